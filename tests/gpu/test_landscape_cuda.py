import numpy as np
import pytest
import torch
from landscape_problem import Residual, coordinates, everything, images, one_at_a_time, used
from torch.nn.functional import cross_entropy

from saltflat.landscape import grid, line_between, loss_surface, random_directions

CUDA = torch.device("cuda")


@pytest.fixture
def exact():
    """Convolutions without TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def problem(seed=0, rows=300):
    torch.manual_seed(seed)
    x, y = (t.to(CUDA) for t in images(rows))
    return used(Residual().to(CUDA), x, y, seed), x, y


@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
def test_replayed_losses_equal_the_definition(batchnorm, exact):
    model, x, y = problem()
    directions = random_directions(model)
    evaluate = grid.SurfaceEvaluator(
        model, cross_entropy, [(x, y)], directions, batchnorm=batchnorm, half=False
    )
    points = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = evaluate(points).numpy()
    assert "CUDA graph" in evaluate.how
    expected = one_at_a_time(model, x, y, directions, points, batch=batchnorm == "batch")
    assert found[:, 0] == pytest.approx(expected[:, 0], rel=2e-4)
    assert np.abs(100 * found[:, 1] / len(x) - expected[:, 1]).max() < 1


def test_bf16_is_chosen_and_stays_within_the_tolerance(exact):
    model, x, y = problem()
    found = loss_surface(model, cross_entropy, [(x, y)], points=12)
    directions = random_directions(model)
    expected = one_at_a_time(model, x, y, directions, coordinates(found))[:, 0]
    absolute, relative = grid.TOLERANCE
    away = np.abs(found.losses.ravel() - expected)
    assert (away <= absolute + relative * expected).all()
    assert found.provenance["how"] == "bf16, BatchNorm folded, CUDA graph"
    assert found.provenance["settings"]["precision"] == "bf16"


def test_rows_are_split_where_memory_is_short(exact, monkeypatch):
    model, x, y = problem()
    whole = loss_surface(model, cross_entropy, [(x, y)], points=3, precision="float32")
    monkeypatch.setattr(grid.SurfaceEvaluator, "_rows_that_fit", lambda *_: 70)
    parts = loss_surface(model, cross_entropy, [(x, y)], points=3, precision="float32")
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)


@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
def test_nothing_is_changed_on_the_gpu(batchnorm):
    model, x, y = problem()
    before, random = everything(model), torch.cuda.get_rng_state()
    loss_surface(model, cross_entropy, [(x, y)], points=3, batchnorm=batchnorm)
    for name, value in everything(model).items():
        same = torch.equal if isinstance(value, torch.Tensor) else (lambda a, b: a == b)
        assert same(value, before[name]), name
    assert torch.equal(torch.cuda.get_rng_state(), random)


def test_the_ends_of_a_line(exact):
    (first, x, y), (second, _, _) = problem(0), problem(1)
    found = loss_surface(
        first, cross_entropy, [(x, y)], directions=line_between(first, second), points=5,
        precision="float32",
    )  # fmt: skip
    with torch.no_grad():
        own = [cross_entropy(model.eval()(x), y).item() for model in (first, second)]
    assert found.losses[[0, -1]] == pytest.approx(own, rel=1e-4)


def test_a_model_that_synchronises_runs_without_a_graph():
    class Waiting(Residual):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) < 1e9 else x

    torch.manual_seed(0)
    x, y = (t.to(CUDA) for t in images())
    model = used(Waiting().to(CUDA), x, y)
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        found = loss_surface(model, cross_entropy, [(x, y)], points=3, precision="float32")
    assert "CUDA graph" not in found.provenance["how"]
    expected = one_at_a_time(model, x, y, random_directions(model), coordinates(found))[:, 0]
    assert found.losses.ravel() == pytest.approx(expected, rel=1e-2)
