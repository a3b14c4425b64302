import copy
import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import dataset, network
from references import climbing_losses
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

from saltflat import sharpness
from saltflat.sharpness import (
    adaptive_sharpness,
    average_sharpness,
    hessian_trace,
    m_sharpness,
    max_sharpness,
    sam_sharpness,
    spectral_density,
    top_eigenvalues,
)
from saltflat.sharpness._interval import mean_interval, quantile
from saltflat.sharpness.neighbourhood import one_step

MEASURES = {
    "sam": sam_sharpness,
    "max": partial(max_sharpness, steps=3),
    "m": partial(m_sharpness, m=6),
    "adaptive": partial(adaptive_sharpness, steps=3),
    "average": partial(average_sharpness, draws=3),
    "eigenvalues": partial(top_eigenvalues, iterations=4),
    "trace": partial(hessian_trace, hvps=6),
    "spectrum": partial(spectral_density, draws=2, iterations=3),
}
POLICIES = ["eval", "recalibrated", "batch"]


def parts(x, y, *sizes):
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def quadratic(seed=0, rows=10, features=4):
    """A linear model with mse: its batches, gradient and Hessian at the weights, in float64."""
    torch.manual_seed(seed)
    x, y = torch.randn(rows, features).double(), torch.randn(rows, 1).double()
    model = nn.Linear(features, 1, bias=False).double()
    w = model.weight.detach().T
    g, hessian = 2 / rows * x.T @ (x @ w - y), 2 / rows * x.T @ x
    return model, parts(x, y, rows // 2, 1, rows - rows // 2 - 1), g[:, 0], hessian


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


def linear(seed=0):
    """A linear classifier, its twin's weights, and data, in float64."""
    torch.manual_seed(seed)
    model = nn.Linear(6, 4).double()
    twin = {"matrix": model.weight.detach().numpy().T.copy(), "bias": model.bias.detach().numpy()}
    x, y = dataset(seed).tensors
    return model, twin, x.double(), y


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
    if groups == 1:
        assert found.interval is None
    else:
        expected = scipy.stats.ttest_1samp(rises, 0).confidence_interval()
        assert found.interval == pytest.approx((expected.low, expected.high), rel=1e-6)


def test_smaller_groups_are_sharper():
    model, _, x, y = linear()
    found = [
        m_sharpness(model, cross_entropy, [(x, y)], rho=0.1, m=m).value for m in (24, 12, 6, 3, 1)
    ]
    assert found == sorted(found)


def test_the_average_case_of_a_quadratic_and_its_interval():
    model, batches, _, hessian = quadratic()
    w = model.weight.detach().flatten()
    truth = 0.3**2 / 2 * (hessian.diag() * w**2).sum().item()
    found = [
        average_sharpness(model, mse_loss, batches, rho=0.3, draws=10, seed=seed)
        for seed in range(300)
    ]
    covered = np.mean([f.interval[0] <= truth <= f.interval[1] for f in found])
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


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 10, 99, 100])
def test_students_t(freedom):
    assert quantile(freedom) == pytest.approx(scipy.stats.t.ppf(0.975, freedom), rel=1e-8)
    values = np.random.default_rng(freedom).normal(size=freedom + 1)
    expected = scipy.stats.ttest_1samp(values, 0).confidence_interval()
    assert mean_interval(values.tolist()) == pytest.approx((expected.low, expected.high))


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
    norm = model[0][1]
    return {
        **{f"state {name}": copied(t) for name, t in model.state_dict().items()},
        **{f"grad {name}": copied(p.grad) for name, p in model.named_parameters()},
        **{f"asks {name}": p.requires_grad for name, p in model.named_parameters()},
        **{f"place {name}": p.data_ptr() for name, p in model.named_parameters()},
        **{f"place {name}": b.data_ptr() for name, b in model.named_buffers()},
        **{f"training {name}": m.training for name, m in model.named_modules()},
        "norm": (norm.track_running_stats, norm.momentum),
        "random": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
        "rounds": torch.backends.cudnn.allow_tf32,
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        equal = torch.equal if isinstance(value, torch.Tensor) else (lambda a, b: a == b)
        assert equal(value, other[name]), name


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


def test_the_policies_differ_and_the_result_says_which_it_was():
    model, (x, y) = used_network(), dataset().tensors
    found = [
        one_step(model, cross_entropy, parts(x, y, 10, 14), batchnorm=policy) for policy in POLICIES
    ]
    assert [f.batchnorm for f in found] == POLICIES
    assert len({f.value for f in found}) == 3
    assert [(f.forward, f.backward) for f in found] == [(2, 1), (4, 1), (2, 1)]
    assert json.dumps(dataclasses.asdict(found[0]))


def test_statistics_of_unequal_batches_are_weighed_by_their_rows():
    model = nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 4))
    x, y = dataset().tensors
    seen = []
    model[0].register_forward_hook(
        lambda layer, *_: seen.append((layer.running_mean.clone(), layer.running_var.clone()))
    )
    one_step(model, cross_entropy, parts(x, y, 6, 18), batchnorm="recalibrated")
    mean, var = seen[2]  # two batches calibrate, the third call is the first loss
    torch.testing.assert_close(mean, x.mean(0))
    torch.testing.assert_close(var, (6 * x[:6].var(0) + 18 * x[6:].var(0)) / 24)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_the_model_is_left_as_it_was(measure, policy):
    model, (x, y) = used_network(), dataset().tensors
    before = snapshot(model)
    first = measure(model, cross_entropy, parts(x, y, 8, 16), batchnorm=policy)
    assert_same(snapshot(model), before)
    torch.manual_seed(7)
    assert measure(model, cross_entropy, parts(x, y, 8, 16), batchnorm=policy) == first


@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_also_after_an_error_in_any_pass(measure, policy, call):
    model, (x, y) = used_network(), dataset().tensors
    before, calls = snapshot(model), []

    def loss_fn(outputs, labels):
        calls.append(1)
        torch.rand(1)
        if len(calls) == call:
            raise KeyError
        return cross_entropy(outputs, labels)

    with pytest.raises(KeyError):
        measure(model, loss_fn, parts(x, y, 8, 16), batchnorm=policy)
    assert_same(snapshot(model), before)


def test_cudnn_computes_in_float32_meanwhile():
    model, (x, y) = network(), dataset().tensors
    before, seen = torch.backends.cudnn.allow_tf32, []
    model.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    for measure in MEASURES.values():
        measure(model, cross_entropy, [(x, y)])
    assert set(seen) == {False}
    assert torch.backends.cudnn.allow_tf32 == before


def test_cudnn_also_where_the_caller_has_the_newer_setting():
    model, (x, y) = network(), dataset().tensors
    conv, seen = torch.backends.cudnn.conv, []
    before = conv.fp32_precision
    model.register_forward_hook(lambda *_: seen.append(conv.fp32_precision))
    try:
        conv.fp32_precision = "none"
        sam_sharpness(model, cross_entropy, [(x, y)])
        assert seen == ["ieee", "ieee"] and conv.fp32_precision == "none"
    finally:
        conv.fp32_precision = before


class Counting(nn.Module):
    """A layer with a buffer that every pass replaces, and noise in every pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes = self.passes + 1
        return x + torch.randn_like(x)


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_noise_is_the_same_in_every_pass_and_buffers_come_back(measure):
    model, (x, y) = nn.Sequential(Counting(), network()), dataset().tensors
    buffer = model[0].passes
    assert sam_sharpness(model, cross_entropy, [(x, y)], rho=0.0) == 0.0
    measure(model, cross_entropy, [(x, y)])
    assert model[0].passes is buffer and buffer == 0


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_an_autocast_around_it_changes_nothing(measure):
    model, (x, y) = network(), dataset().tensors
    expected = measure(model, cross_entropy, [(x, y)])
    with torch.autocast("cpu", torch.bfloat16):
        assert measure(model, cross_entropy, [(x, y)]) == expected
        assert torch.is_autocast_enabled("cpu")


def test_any_iterable_that_can_be_gone_through_again_will_do():
    model, data = network(), dataset()
    shuffled = DataLoader(data, 8, shuffle=True)
    x, y = data.tensors
    assert sam_sharpness(model, cross_entropy, shuffled) == pytest.approx(
        sam_sharpness(model, cross_entropy, [(x, y)]), rel=1e-4
    )


def test_a_compiled_model_is_measured_uncompiled():
    model, (x, y) = network(), dataset().tensors
    compiled = torch.compile(model, backend="eager")
    ours, theirs = (top_eigenvalues(m, cross_entropy, [(x, y)]).values for m in (model, compiled))
    assert ours == theirs


def test_frozen_and_unused_parameters_do_not_move():
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    model.idle = nn.Parameter(torch.ones(3))
    model.forward = lambda x: model[0](x)
    model[0].weight.data.fill_(3.0)
    data = [(torch.ones(1, 1), torch.zeros(1, 1))]
    assert sam_sharpness(model, mse_loss, data, rho=0.5) == pytest.approx(3.5**2 - 3**2)
    assert top_eigenvalues(model, mse_loss, data, count=2).values == pytest.approx((2.0, 0.0))


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
        with pytest.raises(ValueError, match="are not finite: a run that has diverged"):
            measure(model, cross_entropy, [(x, y)])
    assert torch.equal(model[0].weight, before)


class OwnStatistics(nn.Linear):
    running_mean = torch.zeros(1)


X, Y = dataset().tensors


@pytest.mark.parametrize(
    ("measure", "settings", "message"),
    [
        *((m, {"rho": -0.1}, "rho must be 0 or more, got -0.1") for m in list(MEASURES)[:5]),
        ("sam", {"rho": float("nan")}, "rho must be 0 or more, got nan"),
        ("sam", {"rho": float("inf")}, "rho must be 0 or more, got inf"),
        *((m, {"batchnorm": "train"}, "unknown batchnorm 'train': it is one of") for m in MEASURES),
        *((m, {"batches": (b for b in [()])}, "got a generator: pass a list") for m in MEASURES),
        *((m, {"batches": []}, "no batches: pass a list") for m in MEASURES),
        *(
            (m, {"loss_fn": partial(cross_entropy, reduction="none")}, "loss of a batch, got shape")
            for m in MEASURES
        ),
        ("sam", {"model": nn.Linear(6, 4).requires_grad_(False)}, "no parameter of the model"),
        (
            "sam",
            {"model": OwnStatistics(6, 4), "batchnorm": "recalibrated"},
            "OwnStatistics keeps statistics of its own",
        ),
        ("max", {"steps": 0}, "steps must be at least 1, got 0"),
        ("adaptive", {"steps": 0}, "steps must be at least 1, got 0"),
        ("average", {"draws": 1}, "draws must be at least 2, got 1"),
        ("m", {"m": 0}, "m must be at least 1, got 0"),
        ("m", {"m": 25}, "m is 25, and there are 24 rows: choose a smaller m"),
        ("eigenvalues", {"count": 0}, "count must be at least 1, got 0"),
        ("eigenvalues", {"count": 5}, "iterations must be at least count, got 4 and 5"),
        ("eigenvalues", {"count": 400, "iterations": 400}, "and there are 108 weights"),
        ("eigenvalues", {"tolerance": 0.0}, "tolerance must be positive, got 0"),
        ("trace", {"hvps": 3}, "a multiple of three, at least 6, got 3"),
        ("trace", {"hvps": 10}, "a multiple of three, at least 6, got 10"),
        ("spectrum", {"draws": 0}, "draws must be at least 1, got 0"),
        ("spectrum", {"iterations": 0}, "iterations must be at least 1, got 0"),
        ("spectrum", {"points": 1}, "points must be at least 2, got 1"),
        ("spectrum", {"width": 0.0}, "width must be positive, got 0"),
    ],
)
def test_bad_input(measure, settings, message):
    good = {"model": network(), "loss_fn": cross_entropy, "batches": [(X, Y)]}
    with pytest.raises(ValueError, match=message):
        MEASURES[measure](**{**good, **settings})


def test_every_public_name_is_documented():
    for name in set(sharpness.__all__) - {"Policy"}:  # a list of words
        assert getattr(sharpness, name).__doc__
