import pytest
import torch
from torch import nn

from saltflat.core.batchnorm import frozen_running_stats
from saltflat.core.perturb import displaced


def weights():
    return [torch.randn(3, 4), torch.randn(5).to(torch.bfloat16), torch.randn(2, 2).double()]


def test_comes_back_bit_for_bit_in_the_same_storage(device):
    ws = [w.to(device) for w in weights()]
    before, places = [w.clone() for w in ws], [w.data_ptr() for w in ws]
    offsets = [1e3 * torch.randn_like(w) for w in ws]
    with displaced(ws, offsets):
        for w, old, offset in zip(ws, before, offsets, strict=True):
            assert torch.equal(w, old + offset)
    assert all(torch.equal(w, old) for w, old in zip(ws, before, strict=True))
    assert [w.data_ptr() for w in ws] == places


@pytest.mark.parametrize("offset", [float("nan"), float("inf")])
def test_comes_back_from_anywhere_also_after_an_error(offset):
    w = torch.tensor([0.1, -0.0])
    with pytest.raises(KeyError), displaced([w], [torch.full((2,), offset)]):
        raise KeyError
    assert torch.equal(w, torch.tensor([0.1, -0.0]))
    assert torch.signbit(w).tolist() == [False, True]


def test_nested_and_entered_again():
    w = torch.tensor([1.0])
    move = displaced([w], [torch.tensor([2.0])])
    with move:
        with move, displaced([w], [torch.tensor([10.0])]):
            assert w.item() == 15.0
        assert w.item() == 3.0
    with move:
        assert w.item() == 3.0
    assert w.item() == 1.0


def test_gradients_are_taken_where_the_weights_are():
    w = torch.tensor([3.0], requires_grad=True)
    with displaced([w], [torch.tensor([1.0])]):
        (w**2).sum().backward()
    assert w.grad.item() == 8.0
    assert w.is_leaf and w.requires_grad


def test_an_enclosing_autocast_sees_the_move():
    layer, x = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        with displaced([layer.weight], [torch.ones(1, 2)]):
            moved = layer(x)
        after = layer(x)
    assert torch.equal(before, after)
    assert not torch.equal(before, moved)


def test_nothing_to_move():
    with displaced([], []):
        pass
    with pytest.raises(ValueError, match="1 offsets do not fit 0 parameters"):
        displaced([], [torch.ones(1)])


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


def test_offsets_of_another_shape_move_nothing():
    first, second = torch.zeros(2), torch.zeros(2)
    with pytest.raises(ValueError, match="in number or shape"):
        displaced([first, second], [torch.ones(2), torch.ones(3)])
    assert first.tolist() == [0, 0]


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
