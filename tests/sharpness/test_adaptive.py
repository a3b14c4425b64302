import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import dataset
from sharpness_problems import POLICIES, quadratic
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from saltflat.sharpness import adaptive_sharpness, average_sharpness, sam_sharpness


def test_the_average_case_of_a_quadratic_and_its_interval():
    model, batches, _, hessian = quadratic()
    w = model.weight.detach().flatten()
    truth = 0.3**2 / 2 * (hessian.diag() * w**2).sum().item()
    found = [
        average_sharpness(model, mse_loss, batches, rho=0.3, draws=10, seed=seed)
        for seed in range(300)
    ]
    covered = np.mean([f.interval.low <= truth <= f.interval.high for f in found])
    assert 0.90 <= covered <= 0.98
    spread = np.std([f.value for f in found]) / 300**0.5
    assert np.mean([f.value for f in found]) == pytest.approx(truth, abs=4 * spread)
    assert (found[0].forward, found[0].backward) == (11, 0)


@given(
    scale=st.floats(0.05, 20.0), policy=st.sampled_from(POLICIES), rho=st.sampled_from([0.1, 0.5])
)
def test_adaptive_sharpness_does_not_see_the_scale_of_a_layer(scale, policy, rho):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    x, y = dataset().tensors
    data = [(x.double(), y)]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (other[0].weight, other[0].bias):
            tensor *= scale
        other[2].weight /= scale
    for measure in (adaptive_sharpness, average_sharpness):
        ours, theirs = (
            measure(m, cross_entropy, data, rho=rho, batchnorm=policy).value for m in (model, other)
        )
        assert ours == pytest.approx(theirs, rel=1e-6)
    if not 0.5 < scale < 2:
        assert sam_sharpness(model, cross_entropy, data) != pytest.approx(
            sam_sharpness(other, cross_entropy, data), rel=1e-3
        )


def test_one_draw_has_a_value_and_no_interval():
    model, batches, _, _ = quadratic()
    found = average_sharpness(model, mse_loss, batches, draws=1)
    assert found.interval.mean == found.value != 0
    assert found.interval.n == 1 and np.isnan([found.interval.low, found.interval.high]).all()
