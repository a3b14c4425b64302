import pytest
import torch
from torch import nn

from saltflat.core.batchnorm import frozen_running_stats


class Centred(nn.Module):
    """A normalisation of somebody's own, with running statistics."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))

    def forward(self, x):
        self.running_mean.lerp_(x.mean(0).detach(), 0.1)
        return x - x.mean(0)


NORMS = {
    "batchnorm": lambda: nn.BatchNorm1d(4),
    "momentum None": lambda: nn.BatchNorm1d(4, momentum=None),
    "not tracking": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "somebody's own": Centred,
}


@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_a_frozen_pass_normalises_as_in_training_and_leaves_no_trace(make):
    layer, x = make(), torch.randn(8, 4)
    layer(x + 1)
    expected = layer(x)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    settings = [dict(vars(m)) for m in layer.modules()]
    guard = frozen_running_stats(layer)
    with guard:
        with guard, frozen_running_stats(layer):
            torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(layer(x), expected)
    with guard:
        layer(x)
    for name, buffer in layer.state_dict().items():
        assert torch.equal(buffer, before[name]), name
    assert [m.training for m in layer.modules()] == [True] * len(settings)
    after = [vars(m).get("track_running_stats") for m in layer.modules()]
    assert after == [s.get("track_running_stats") for s in settings]
    assert [vars(m).get("momentum") for m in layer.modules()] == [
        s.get("momentum") for s in settings
    ]


def test_a_layer_that_comes_later_or_changes_mode_inside_is_frozen_too():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Identity()), torch.randn(8, 4)
    guard = frozen_running_stats(model)
    model[1] = nn.BatchNorm1d(4).eval()
    with guard:
        model.train()(x)
    assert model[1].num_batches_tracked == 0


def test_layers_in_eval_mode_go_on_using_their_statistics():
    layer, x = nn.BatchNorm1d(4), torch.randn(8, 4)
    layer(x + 1)
    layer.eval()
    expected = layer(x)
    with frozen_running_stats(layer):
        assert torch.equal(layer(x), expected)


def test_an_error_inside_is_survived():
    layer = nn.BatchNorm1d(4)
    with pytest.raises(KeyError), frozen_running_stats(layer):
        raise KeyError
    assert layer.track_running_stats
    with frozen_running_stats(None):
        pass
