import copy

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import dataset, network
from references import climbing_losses
from sharpness_problems import POLICIES, linear, parts, quadratic, used_network
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.swa_utils import update_bn

from saltflat.sharpness import (
    adaptive_sharpness,
    average_sharpness,
    m_sharpness,
    max_sharpness,
    sam_sharpness,
    spectral_density,
    top_eigenvalues,
)


@pytest.mark.parametrize("rho", [0.0, 1e-3, 0.05, 2.0])
def test_a_quadratic_in_closed_form(rho):
    model, batches, g, hessian = quadratic()
    direction = g / g.norm()
    expected = rho * g.norm() + rho**2 / 2 * direction @ hessian @ direction
    measured = sam_sharpness(model, mse_loss, batches, rho=rho)
    assert measured == pytest.approx(expected.item(), rel=1e-10, abs=1e-13)


def greatest_of_a_quadratic(g, hessian, rho):
    """max g u + u H u / 2 over |u| <= rho: on the sphere (mu - H) u = g, mu above every eigenvalue,
    and |u| falls as mu grows."""
    values, vectors = np.linalg.eigh(hessian)
    turned = vectors.T @ g
    low, high = values[-1], values[-1] + np.linalg.norm(g) / rho
    for _ in range(200):
        mu = (low + high) / 2
        low, high = (mu, high) if np.linalg.norm(turned / (mu - values)) > rho else (low, mu)
    u = turned / (high - values)
    return turned @ u + (values * u**2).sum() / 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rho", [0.01, 0.3, 5.0])
def test_the_greatest_rise_of_a_quadratic(seed, rho):
    model, batches, g, hessian = quadratic(seed)
    truth = greatest_of_a_quadratic(g.numpy(), hessian.numpy(), rho)
    found = [max_sharpness(model, mse_loss, batches, rho=rho, steps=k).value for k in (1, 2, 5, 60)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(sam_sharpness(model, mse_loss, batches, rho=rho))
    assert found[-1] == pytest.approx(truth, rel=1e-4)
    assert found[-1] <= truth * (1 + 1e-9)


@given(
    seed=st.integers(0, 5),
    rho=st.floats(0.01, 3.0),
    steps=st.integers(1, 6),
    size=st.integers(1, 24),
)
def test_climbs_are_those_of_the_twin(seed, rho, steps, size):
    model, twin, x, y = linear(seed)
    batches = list(zip(x.split(size), y.split(size), strict=True))
    for measure, scaled in ((max_sharpness, False), (adaptive_sharpness, True)):
        losses = climbing_losses(twin, x.numpy(), y.numpy(), rho, steps, scaled)
        found = measure(model, cross_entropy, batches, rho=rho, steps=steps)
        assert found.value == pytest.approx(max(losses) - losses[0], rel=1e-9, abs=1e-12)
        assert (found.forward, found.backward, found.hvps) == (steps + 1, steps, 0)
        assert found.images == 24 and found.interval is None and found.rho == rho


@pytest.mark.parametrize(("m", "groups"), [(24, 1), (7, 3), (1, 24)])
def test_m_sharpness_is_the_mean_of_the_twins(m, groups):
    model, twin, x, y = linear()
    rises = []
    for start in range(0, m * groups, m):
        part = slice(start, start + m)
        losses = climbing_losses(twin, x[part].numpy(), y[part].numpy(), 0.3, 1, False)
        rises.append(losses[1] - losses[0])
    found = m_sharpness(model, cross_entropy, parts(x, y, 5, 19), rho=0.3, m=m)
    assert found.value == pytest.approx(np.mean(rises), rel=1e-9)
    assert (found.images, found.forward, found.backward) == (m * groups, 2, 1)
    assert (found.interval.mean, found.interval.n) == (found.value, groups)
    if groups > 1:
        expected = scipy.stats.ttest_1samp(rises, 0).confidence_interval()
        ends = found.interval.low, found.interval.high
        assert ends == pytest.approx((expected.low, expected.high), rel=1e-6)


def test_smaller_groups_are_sharper():
    model, _, x, y = linear()
    found = [
        m_sharpness(model, cross_entropy, [(x, y)], rho=0.1, m=m).value for m in (24, 12, 6, 3, 1)
    ]
    assert found == sorted(found)


def by_hand(model, batches, rho, policy):
    """SAM's sharpness by the definition, on copies in float64, all batches in one graph."""
    model = copy.deepcopy(model).double().eval()
    batches = [(x.double(), y) for x, y in batches]

    def loss_of(model):
        if policy == "recalibrated":
            for module in model.modules():
                module.training = isinstance(module, nn.BatchNorm1d)
            update_bn_alone(model, batches)
        for module in model.modules():
            module.training = policy == "batch" and isinstance(module, nn.BatchNorm1d)
        losses = [cross_entropy(model(x), y) * len(x) for x, y in batches]
        return sum(losses) / sum(len(x) for x, _ in batches)

    trained = [p for p in model.parameters() if p.requires_grad]
    before = loss_of(model)
    gradients = torch.autograd.grad(before, trained)
    norm = sum((g**2).sum() for g in gradients).sqrt()
    for p, g in zip(trained, gradients, strict=True):
        p.data += rho * g / norm
    return (loss_of(model) - before).item()


def update_bn_alone(model, batches):
    """torch's own recalibration, with the other layers as in evaluation."""
    others = [m for m in model.modules() if not isinstance(m, nn.BatchNorm1d)]
    for module in others:
        module.train = lambda mode=True, own=module: own  # or update_bn would wake the dropout
    with torch.no_grad():
        update_bn([x for x, _ in batches], model)


@pytest.mark.parametrize("rho", [0.05, 1.0])
@pytest.mark.parametrize("sizes", [(24,), (8, 8, 8), (12, 12)])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_network_by_hand(rho, sizes, policy, device):
    model, (x, y) = used_network(), dataset().tensors
    batches = parts(x, y, *sizes)
    expected = by_hand(model, batches, rho, policy)
    model = model.to(device)
    batches = [(x.to(device), y.to(device)) for x, y in batches]
    with torch.no_grad():  # which the caller may be in
        measured = sam_sharpness(model, cross_entropy, batches, rho=rho, batchnorm=policy)
    assert measured == pytest.approx(expected, rel=2e-4)
    assert expected > 1e-3


def test_at_a_stationary_point_there_is_no_direction():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    data = [(torch.ones(1, 1), torch.zeros(1, 1))]
    assert sam_sharpness(model, mse_loss, data) == 0.0
    assert max_sharpness(model, mse_loss, data).value == 0.0


def test_a_diverged_model_is_no_number():
    model, (x, y) = network(), dataset().tensors
    model[3].bias.data.fill_(float("nan"))
    before = model[0].weight.detach().clone()
    for measure in (max_sharpness, adaptive_sharpness, average_sharpness):
        assert np.isnan(measure(model, cross_entropy, [(x, y)]).value)
    for measure in (top_eigenvalues, spectral_density):
        with pytest.raises(ValueError, match=r"second derivatives.*not finite.*diverged"):
            measure(model, cross_entropy, [(x, y)])
    assert torch.equal(model[0].weight, before)
