import numpy as np
import pytest
import tape
import torch
from landscape_problem import Residual, coordinates, images, one_at_a_time, residual, used
from torch import nn
from torch.nn.functional import cross_entropy

from saltflat.core import cuda_graph
from saltflat.landscape import grid, loss_surface, random_directions, surface


@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
@pytest.mark.parametrize("sizes", [(20,), (7, 13)])
def test_losses_and_accuracies_equal_the_definition(batchnorm, sizes, device):
    model, (x, y) = residual().to(device), (t.to(device) for t in images())
    if batchnorm == "batch" and len(sizes) > 1:
        sizes = (20,)  # each batch has statistics of its own
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    found = loss_surface(
        model, cross_entropy, batches, points=5, batchnorm=batchnorm, precision="float32"
    )
    directions = random_directions(model)
    at = coordinates(found)
    expected = one_at_a_time(model, x, y, directions, at, batch=batchnorm == "batch")
    rel = 1e-4 if device.type == "cpu" else 5e-3  # a GPU's convolutions round to TF32
    assert found.losses.ravel() == pytest.approx(expected[:, 0], rel=rel)
    assert found.accuracies.ravel() == pytest.approx(expected[:, 1], abs=5.1)  # a row may be a tie
    assert np.abs(found.accuracies.ravel() - expected[:, 1]).mean() < 0.5
    assert found.provenance["difference"]["relative"] < rel
    assert ("folded" in found.provenance["how"]) == (batchnorm == "eval")
    assert found.provenance["origin_loss"] == pytest.approx(
        one_at_a_time(model, x, y, directions, torch.zeros(1, 2), batch=batchnorm == "batch")[0, 0],
        rel=rel,
    )


def test_a_cpu_splits_the_rows(monkeypatch):
    model, data = residual(), [images()]
    whole = loss_surface(model, cross_entropy, data, points=3)
    monkeypatch.setattr(grid, "_CPU_ROWS", 6)
    parts = loss_surface(model, cross_entropy, data, points=3)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.fixture
def replays(monkeypatch):
    """Capture on the CPU with the tape, as on a GPU; the inputs of each replay."""
    found = []

    def capture(step, inputs):
        buffers, outputs = [x.clone() for x in inputs], []
        replay = tape.record(lambda: outputs.append(step._step(*buffers)))

        def replay_and_count():
            found.append(buffers[0].tolist())
            replay()

        return cuda_graph._Graph(buffers, outputs[0], replay_and_count)

    monkeypatch.setattr(cuda_graph.GraphedStep, "_can_capture", lambda step, inputs: True)
    monkeypatch.setattr(cuda_graph.GraphedStep, "_eagerly", lambda step, xs: step._step(*xs))
    monkeypatch.setattr(cuda_graph.GraphedStep, "_capture", capture)
    return found


def test_a_replay_gives_the_same_losses(replays):
    model, (x, y) = residual(), images()
    directions = random_directions(model)
    evaluate = grid.SurfaceEvaluator(
        model, cross_entropy, [(x, y)], directions, batchnorm="eval", half=False
    )
    points = torch.randn(11, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = one_at_a_time(model, x, y, directions, points)
    found = evaluate(points).numpy()
    assert found[:, 0] == pytest.approx(expected[:, 0], rel=1e-4)
    assert 100 * found[:, 1] / len(x) == pytest.approx(expected[:, 1])
    assert replays == points[3:].float().tolist()
    assert evaluate(points[:1])[0, 0] == pytest.approx(expected[0, 0], rel=1e-4)


def test_a_step_that_cannot_be_captured_runs_eagerly(replays, monkeypatch):
    def refuse(step, inputs):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model, data = residual(), [images()]
    expected = loss_surface(model, cross_entropy, data, points=3)
    assert replays
    monkeypatch.setattr(cuda_graph.GraphedStep, "_capture", refuse)
    with pytest.warns(UserWarning, match="without a CUDA graph: .*stream is capturing$"):
        found = loss_surface(model, cross_entropy, data, points=3)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert "CUDA graph" not in found.provenance["how"]


def test_an_error_of_the_model_is_raised_as_it_is():
    with pytest.raises(RuntimeError, match="channels"):
        loss_surface(residual(), cross_entropy, [(torch.zeros(2, 4, 6, 6), torch.zeros(2).long())])


def test_a_model_that_cannot_be_traced_is_not_folded():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Residual()

        def forward(self, x):
            return self.inner(x) if x.sum() > -1e9 else x

    torch.manual_seed(0)
    model, (x, y) = used(Branching(), *images()), images()
    found = loss_surface(model, cross_entropy, [(x, y)], points=3)
    expected = one_at_a_time(model, x, y, random_directions(model), coordinates(found))
    assert found.losses.ravel() == pytest.approx(expected[:, 0], rel=1e-5)
    assert found.provenance["how"] == "float32"


def test_bf16_stays_within_the_tolerance():
    model, data = residual(), [images()]
    exact = loss_surface(model, cross_entropy, data, points=4)
    half = loss_surface(model, cross_entropy, data, points=4, precision="bf16")
    absolute, relative = grid.TOLERANCE
    assert (np.abs(half.losses - exact.losses) <= absolute + relative * exact.losses).all()
    assert not np.array_equal(half.losses, exact.losses)
    assert half.provenance["how"].startswith("bf16")
    assert 0 < half.provenance["difference"]["absolute"] < 0.1


def test_bf16_is_not_used_where_it_is_too_coarse(monkeypatch):
    def steep(outputs, y):
        return cross_entropy(outputs, y) + 100 * (outputs[0, 0] - outputs[0, 1]) ** 2

    model, data = residual(), [images()]
    exact = loss_surface(model, steep, data, points=3)
    monkeypatch.setattr(grid, "TOLERANCE", (1e-5, 1e-5))
    monkeypatch.setattr(surface, "_has_bf16", lambda weight: True)  # as on a GPU
    found = loss_surface(model, steep, data, points=3)
    assert found.provenance["how"].startswith("float32")
    assert np.array_equal(found.losses, exact.losses)
    asked = loss_surface(model, steep, data, points=3, precision="bf16")
    assert asked.provenance["how"].startswith("bf16")
