import copy

import pytest
import torch
from problems import dataset, network
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from saltflat.sharpness import sam_sharpness


def parts(x, y, *sizes):
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


@pytest.mark.parametrize("rho", [0.0, 1e-3, 0.05, 2.0])
def test_a_quadratic_in_closed_form(rho):
    torch.manual_seed(0)
    x, y = torch.randn(10, 4).double(), torch.randn(10, 1).double()
    model = nn.Linear(4, 1, bias=False).double()
    w = model.weight.detach().T
    g, hessian = x.T @ (x @ w - y) / 5, x.T @ x / 5  # of the mean of (x w - y)^2
    g, length = g / g.norm(), g.norm()
    expected = rho * length + rho**2 / 2 * (g.T @ hessian @ g).squeeze()
    measured = sam_sharpness(model, mse_loss, parts(x, y, 5, 1, 4), rho=rho)
    assert measured == pytest.approx(expected.item(), rel=1e-10, abs=1e-13)


def by_hand(model, x, y, rho):
    """The definition, on a copy in float64, with all the rows in one batch."""
    model = copy.deepcopy(model).double().eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    before = cross_entropy(model(x.double()), y)
    gradients = torch.autograd.grad(before, trained)
    norm = sum((g**2).sum() for g in gradients).sqrt()
    for p, g in zip(trained, gradients, strict=True):
        p.data += rho * g / norm
    return (cross_entropy(model(x.double()), y) - before).item()


def used_network():
    """A network with running statistics of its own, gradients, and flags of both kinds."""
    model = nn.Sequential(network(), nn.Dropout(0.5))
    x, y = dataset().tensors
    for _ in range(5):
        cross_entropy(model(3 * x + 1), y).backward()
    model[0][0].bias.requires_grad_(False)
    model[0][3].bias.grad = None
    model[0].eval()
    model[0][1].train()
    return model


def snapshot(model):
    """Everything that could have changed, and a copy of it."""
    copied = lambda t: None if t is None else t.clone()  # noqa: E731
    return {
        **{f"state {name}": copied(t) for name, t in model.state_dict().items()},
        **{f"grad {name}": copied(p.grad) for name, p in model.named_parameters()},
        **{f"asks {name}": p.requires_grad for name, p in model.named_parameters()},
        **{f"place {name}": p.data_ptr() for name, p in model.named_parameters()},
        **{f"training {name}": m.training for name, m in model.named_modules()},
        "tracks": model[0][1].track_running_stats,
        "random": torch.get_rng_state(),
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        equal = torch.equal if isinstance(value, torch.Tensor) else (lambda a, b: a == b)
        assert equal(value, other[name]), name


@pytest.mark.parametrize("rho", [0.05, 1.0])
@pytest.mark.parametrize("sizes", [(24,), (8, 8, 8), (1, 20, 3)])
def test_a_network_by_hand(rho, sizes):
    model, (x, y) = used_network(), dataset().tensors
    expected = by_hand(model, x, y, rho)
    with torch.no_grad():  # which the caller may be in
        measured = sam_sharpness(model, cross_entropy, parts(x, y, *sizes), rho=rho)
    assert measured == pytest.approx(expected, rel=1e-4)
    assert expected > 1e-3


def test_the_model_is_left_as_it_was():
    model, (x, y) = used_network(), dataset().tensors
    before = snapshot(model)
    sam_sharpness(model, cross_entropy, parts(x, y, 8, 16), rho=10.0)
    assert_same(snapshot(model), before)


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6])
def test_also_after_an_error_in_any_pass(call):
    model, (x, y) = used_network(), dataset().tensors
    before, calls = snapshot(model), []

    def loss_fn(outputs, labels):
        calls.append(1)
        if len(calls) == call:
            raise KeyError
        return cross_entropy(outputs, labels)

    with pytest.raises(KeyError):
        sam_sharpness(model, loss_fn, parts(x, y, 8, 16))
    assert_same(snapshot(model), before)


def test_frozen_and_unused_parameters_do_not_move():
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    model.idle = nn.Parameter(torch.ones(3))
    model.forward = lambda x: model[0](x)
    model[0].weight.data.fill_(3.0)
    data = [(torch.ones(1, 1), torch.zeros(1, 1))]
    assert sam_sharpness(model, mse_loss, data, rho=0.5) == pytest.approx(3.5**2 - 3**2)


def test_at_a_stationary_point_there_is_no_direction():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    assert sam_sharpness(model, mse_loss, [(torch.ones(1, 1), torch.zeros(1, 1))]) == 0.0


@pytest.mark.parametrize("rho", [-0.1, float("nan")])
def test_bad_rho(rho):
    with pytest.raises(ValueError, match=f"rho must be 0 or more, got {rho}"):
        sam_sharpness(nn.Linear(1, 1), mse_loss, [], rho=rho)


def test_a_generator_would_be_empty_the_second_time():
    with pytest.raises(ValueError, match="three times, got a generator: pass a list"):
        sam_sharpness(nn.Linear(1, 1), mse_loss, (batch for batch in [()]))
