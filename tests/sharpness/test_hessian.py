import warnings

import numpy as np
import pytest
import scipy
import torch
from problems import dataset
from references import linear_hessian
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from saltflat.sharpness import hessian_trace, spectral_density, top_eigenvalues
from saltflat.sharpness.objective import open_objective


def smooth(seed=0):
    """A network with BatchNorm and dropout, and two derivatives everywhere."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 4)
    )
    x, _ = dataset().tensors
    for _ in range(3):
        model(2 * x + 1)
    return model.double()


def batches(*sizes):
    x, y = dataset().tensors
    return list(zip(x.double().split(sizes), y.split(sizes), strict=True))


class Attention(nn.Module):
    """Attention over six tokens, by torch's fused kernel where it may."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(1, 24), nn.Linear(8, 4)

    def forward(self, x):
        q, k, v = self.embed(x[:, None, :, None]).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(attended.mean((1, 2)))


def dense(model, data, policy):
    """The Hessian by torch's own differentiation, a column after another, in float64."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    others = {n: t for n, t in model.state_dict().items() if n not in names}
    model.eval()
    if policy == "recalibrated":
        x = torch.cat([x for x, _ in data])
        hidden = model[0](x)
        assert len(data) == 1  # or a mean of variances would be meant
        others["1.running_mean"] = hidden.mean(0).detach()
        others["1.running_var"] = hidden.var(0).detach()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.training = policy == "batch"
            layer.track_running_stats = policy != "batch"

    def loss(flat):
        parts = flat.split([p.numel() for p in trained])
        tensors = {n: t.view_as(p) for n, t, p in zip(names, parts, trained, strict=True)}
        outputs = [functional_call(model, {**others, **tensors}, (x,)) for x, _ in data]
        losses = [cross_entropy(o, y) * len(y) for o, (_, y) in zip(outputs, data, strict=True)]
        return sum(losses) / sum(len(y) for _, y in data)

    flat = torch.cat([p.reshape(-1) for p in trained])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.autograd.functional.hessian(loss, flat).detach()


CASES = {
    "eval": (smooth, (24,), "eval"),
    "eval, in parts": (smooth, (7, 1, 16), "eval"),
    "recalibrated": (smooth, (24,), "recalibrated"),
    "batch": (smooth, (12, 12), "batch"),
    "attention": (lambda: Attention().double(), (24,), "eval"),
}


@pytest.mark.parametrize(("make", "sizes", "policy"), CASES.values(), ids=CASES)
def test_products_eigenvalues_and_trace_are_those_of_the_dense_hessian(make, sizes, policy, device):
    data = batches(*sizes)
    truth = dense(make(), data, policy)
    values = torch.linalg.eigvalsh(truth).flip(0)
    model, data = make().to(device), [(x.to(device), y.to(device)) for x, y in data]
    vectors = torch.randn(3, len(truth), dtype=torch.float64)
    with open_objective(model, cross_entropy, data, policy) as objective, objective.at():
        products = objective.products(vectors.to(device)).cpu()
    torch.testing.assert_close(products, vectors @ truth, rtol=1e-9, atol=1e-10)

    found = top_eigenvalues(model, cross_entropy, data, count=4, tolerance=1e-8, batchnorm=policy)
    assert found.converged and found.batchnorm == policy and found.images == 24
    assert found.values == pytest.approx(values[:4].tolist(), rel=1e-8)
    assert 4 < found.hvps <= len(truth) + 4
    trace = hessian_trace(model, cross_entropy, data, hvps=3 * len(truth), batchnorm=policy)
    assert trace.value == pytest.approx(truth.trace().item(), rel=1e-9)
    ends = trace.interval.low, trace.interval.high
    assert ends == pytest.approx((trace.value, trace.value), rel=1e-9)
    assert trace.interval.mean == trace.value and trace.interval.n == len(truth)
    rough = hessian_trace(model, cross_entropy, data, hvps=30, batchnorm=policy)
    assert rough.hvps == 30
    assert rough.interval.low < truth.trace().item() < rough.interval.high


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_the_precision_of_the_weights(dtype, device):
    data = [(x.to(device, dtype), y.to(device)) for x, y in batches(10, 14)]
    truth = dense(smooth(), batches(10, 14), "eval")
    model = smooth().to(device, dtype)
    exact = 1e-4 if dtype == torch.float32 else 1e-9
    found = top_eigenvalues(model, cross_entropy, data, count=2, tolerance=1e-5)
    expected = torch.linalg.eigvalsh(truth).flip(0)[:2].tolist()
    assert found.converged
    assert found.values == pytest.approx(expected, rel=exact)


def test_a_linear_classifier_by_its_twin():
    torch.manual_seed(0)
    model, (x, _) = nn.Linear(6, 4).double(), dataset().tensors
    twin = {"matrix": model.weight.detach().numpy().T, "bias": model.bias.detach().numpy()}
    truth = linear_hessian(twin, x.double().numpy())
    found = top_eigenvalues(model, cross_entropy, batches(4, 20), count=3, tolerance=1e-9)
    assert found.values == pytest.approx(np.linalg.eigvalsh(truth)[::-1][:3], rel=1e-9)
    trace = hessian_trace(model, cross_entropy, batches(4, 20), hvps=90)
    assert trace.value == pytest.approx(np.trace(truth), rel=1e-9)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_products_are_those_of_curvlinops():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its dependencies' own
        import curvlinops

    model, data = smooth().eval(), batches(7, 17)
    model[0].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    theirs = curvlinops.HessianLinearOperator(model, nn.CrossEntropyLoss(), trained, data)
    size = sum(p.numel() for p in trained)
    everything = theirs @ torch.eye(size, dtype=torch.float64)
    with open_objective(model, cross_entropy, data, "eval") as objective, objective.at():
        ours = objective.products(torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(ours.T, everything)
    largest = torch.linalg.eigvalsh(everything)[-1].item()
    found = top_eigenvalues(model, cross_entropy, data, tolerance=1e-6)
    assert found.values[0] == pytest.approx(largest, rel=1e-9)


def test_what_has_not_converged_says_so():
    data = batches(24)
    found = top_eigenvalues(smooth(), cross_entropy, data, tolerance=1e-9, iterations=2)
    assert not found.converged and found.hvps == 3
    assert found.residuals[0] > 1e-9 * found.values[0]


def test_the_density_is_that_of_the_eigenvalues():
    model, data = smooth(), batches(24)
    truth = torch.linalg.eigvalsh(dense(smooth(), data, "eval")).numpy()
    found = spectral_density(
        model, cross_entropy, data, draws=60, iterations=60, width=0.05, points=400
    )
    at, density, low, high = (np.array(getattr(found, n)) for n in ("at", "density", "low", "high"))
    assert scipy.integrate.trapezoid(density, at) == pytest.approx(1, abs=1e-3)
    bells = np.exp(-(((at[:, None] - truth) / 0.05) ** 2) / 2) / (0.05 * (2 * np.pi) ** 0.5)
    expected = bells.mean(1)
    assert ((low <= expected) & (expected <= high)).mean() > 0.85
    assert np.abs(density - expected).max() < 0.15 * expected.max()
    assert found.hvps == sum(len(nodes) for nodes in found.nodes)
    mean = np.mean([np.dot(n, w) for n, w in zip(found.nodes, found.weights, strict=True)])
    assert mean == pytest.approx(truth.mean(), rel=0.3)
    assert found.width == 0.05 and len(found.at) == 400


def test_one_draw_has_no_interval_and_no_curvature_is_a_spike_at_zero():
    model = nn.Linear(2, 1)
    found = spectral_density(model, lambda out, y: out.mean(), [(torch.ones(3, 2),) * 2], draws=1)
    assert found.low == found.high == ()
    assert found.nodes == ((0.0,),) and found.weights == ((1.0,),) and found.width == 1.0
    assert found.hvps == 1
    flat = top_eigenvalues(model, lambda out, y: out.mean(), [(torch.ones(3, 2),) * 2], count=2)
    assert flat.values == (0.0, 0.0) and flat.converged
