import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from landscape_problem import coordinates, everything, images, residual
from problems import dataset, network
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot

from saltflat.landscape import Surface, line_between, loss_surface, random_directions, surface


@pytest.mark.parametrize("count", [1, 2])
def test_a_quadratic_in_closed_form(count, device):
    torch.manual_seed(0)
    x, y = (torch.randn(10, n, dtype=torch.float64, device=device) for n in (4, 3))
    model = nn.Linear(4, 3, dtype=torch.float64, device=device)
    directions = random_directions(model, seed=5, count=count)
    found = loss_surface(
        model, mse_loss, [(x[:3], y[:3]), (x[3:], y[3:])], directions=directions, points=7, span=2.5
    )
    w, bias = model.weight.detach(), model.bias.detach()
    expected = []
    for point in coordinates(found).tolist():
        moved = w + sum(c * axis["weight"] for c, axis in zip(point, directions.axes, strict=True))
        expected.append(((x @ moved.T + bias - y) ** 2).mean().item())
    assert found.losses.shape == (7,) * count
    assert found.losses.ravel() == pytest.approx(np.array(expected), rel=1e-12)
    assert found.x.tolist() == np.linspace(-2.5, 2.5, 7).tolist()
    assert found.accuracies is None
    assert found.complete


@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
def test_nothing_is_changed(batchnorm):
    model = residual()
    model.stem.eval()
    model.head.bias.requires_grad_(False)
    before = everything(model)
    loss_surface(model, cross_entropy, [images()], points=3, batchnorm=batchnorm)
    after = everything(model)
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal if isinstance(value, torch.Tensor) else (lambda a, b: a == b)
        assert same(value, after[name]), name


def test_an_enclosing_autocast_changes_nothing(tmp_path):
    model, data, path = residual(), [images()], tmp_path / "landscape.npz"
    made = loss_surface(model, cross_entropy, data, points=3, path=path)
    with torch.autocast("cpu", torch.bfloat16):
        again = loss_surface(model, cross_entropy, data, points=3)
        loss_surface(model, cross_entropy, data, points=3, path=path)
    assert np.array_equal(again.losses, made.losses)


def test_empty_batches_are_left_out():
    model, (x, y) = residual(), images()
    made = loss_surface(model, cross_entropy, [(x, y)], points=3, batchnorm="batch")
    batches = [(x[:0], y[:0]), (x, y)]
    again = loss_surface(model, cross_entropy, batches, points=3, batchnorm="batch")
    assert np.array_equal(again.losses, made.losses)


def test_a_line_ends_at_the_two_models():
    first, second = residual(0), residual(1)
    x, y = images()
    found = loss_surface(
        first, cross_entropy, [(x, y)], directions=line_between(first, second), points=5
    )
    with torch.no_grad():
        own = [cross_entropy(model.eval()(x), y).item() for model in (first, second)]
    assert found.x.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert found.losses[[0, -1]] == pytest.approx(own, rel=1e-5)
    assert own[0] != pytest.approx(own[1], rel=1e-4)
    assert found.marks.tolist() == [[0], [1]]


def test_variances_are_not_negative_beyond_the_ends_of_a_line():
    first, second = residual(0), residual(1)
    second.stem[1].running_var *= 0.1
    found = loss_surface(
        first, cross_entropy, [images()], directions=line_between(first, second), points=9, span=5
    )
    assert (found.x[0], found.x[-1]) == (-2, 3)
    assert np.isfinite(found.losses).all()


def test_a_file_keeps_the_surface(tmp_path):
    model, data = residual(), [images()]
    path = tmp_path / "landscape.npz"
    made = loss_surface(model, cross_entropy, data, points=3, path=path, facts={"run": "a"})
    line = loss_surface(
        network(), cross_entropy, [dataset().tensors], points=3,
        directions=random_directions(network(), count=1), path=tmp_path / "line.npz",
    )  # fmt: skip
    for one, file in ((made, path), (line, tmp_path / "line.npz")):
        kept = Surface.load(file)
        for name in ("x", "y", "losses", "accuracies", "marks"):
            assert np.array_equal(getattr(kept, name), getattr(one, name)), name
        assert kept.provenance == one.provenance
        assert kept.complete
    assert line.y is None
    assert made.provenance["run"] == "a"
    assert made.provenance["settings"]["seed"] == 0
    assert made.provenance["seconds"] > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["landscape.npz", "line.npz"]


INTERRUPTED = """
import os, signal, sys
import torch
sys.path.insert(0, sys.argv[2])
from landscape_problem import images, residual, cross_entropy
from saltflat.landscape import loss_surface, surface

torch.set_num_threads(int(sys.argv[3]))
surface._CHUNK, surface._SAVE_SECONDS, surface._LOOK_SECONDS = 5, 0.0, 1e9
calls = []

def progress(done, total):
    calls.append(done)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)

loss_surface(residual(), cross_entropy, [images()], points=6, path=sys.argv[1], progress=progress)
"""


def test_a_killed_surface_resumes_to_the_same_losses(tmp_path, monkeypatch):
    monkeypatch.setattr(surface, "_LOOK_SECONDS", 1e9)
    path, seen = tmp_path / "landscape.npz", []
    here, threads = str(Path(__file__).parent.parent), str(torch.get_num_threads())
    command = [sys.executable, "-c", INTERRUPTED, str(path), here, threads]
    killed = subprocess.run(command, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    part = Surface.load(path)
    assert (part.done, part.complete) == (11, False)
    assert np.isnan(part.losses.ravel()).sum() == 36 - 11
    model, data = residual(), [images()]
    whole = loss_surface(
        model, cross_entropy, data, points=6, path=path,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(12, 36), (36, 36)]
    undisturbed = loss_surface(model, cross_entropy, data, points=6)
    assert np.array_equal(whole.losses, undisturbed.losses)
    assert np.array_equal(whole.accuracies, undisturbed.accuracies)
    assert np.array_equal(Surface.load(path).losses, undisturbed.losses)


def test_an_error_saves_what_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(surface, "_CHUNK", 4)
    monkeypatch.setattr(surface, "_LOOK_SECONDS", 1e9)
    model, data, path = residual(), [images()], tmp_path / "new" / "landscape.npz"

    def stop(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loss_surface(model, cross_entropy, data, points=3, path=path, progress=stop)
    assert Surface.load(path).done == 5
    assert loss_surface(model, cross_entropy, data, points=3, path=path).complete


def test_slow_points_are_evaluated_one_by_one(monkeypatch):
    seen = []
    for seconds in (0.0, 1e9):
        monkeypatch.setattr(surface, "_LOOK_SECONDS", seconds)
        loss_surface(
            network(), cross_entropy, [dataset().tensors], points=13,
            progress=lambda done, total: seen.append(done),
        )  # fmt: skip
    assert seen == [*range(1, 170), 1, 129, 169]


def test_a_complete_surface_is_returned_without_its_losses(tmp_path):
    model, data, path = residual(), [images()], tmp_path / "landscape.npz"
    made = loss_surface(model, cross_entropy, data, points=3, path=path)
    calls = []

    def counted(outputs, y):
        calls.append(len(y))
        return cross_entropy(outputs, y)

    again = loss_surface(model, counted, data, points=3, path=path)
    assert np.array_equal(again.losses, made.losses)
    assert calls == [20] * 3  # the fingerprint


@pytest.mark.parametrize(
    "other",
    [
        nn.CrossEntropyLoss(label_smoothing=0.01),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1, 1, 1, 1.1])),
        lambda outputs, y: 1.001 * cross_entropy(outputs, y),
        lambda outputs, y: mse_loss(outputs, one_hot(y, 5).float()),
        lambda outputs, y: cross_entropy(outputs.clamp(-5, 5), y),
    ],
)
@pytest.mark.parametrize("done", [4, 9])
def test_another_loss_function_is_refused(other, done, tmp_path):
    model, data, path = residual(), [images()], tmp_path / "landscape.npz"
    part = loss_surface(model, cross_entropy, data, points=3, path=path)
    part.done = done
    part.save(path)
    with pytest.raises(ValueError, match=r"\(loss is '[\d. ]+' there and '[\d. ]+' here\)"):
        loss_surface(model, other, data, points=3, path=path)
    assert Surface.load(path).done == done
    assert loss_surface(model, nn.CrossEntropyLoss(), data, points=3, path=path).complete


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"points": 4}, "points is 3 there and 4 here"),
        ({"span": 0.5}, "span is 1.0 there and 0.5 here"),
        ({"batchnorm": "batch"}, "batchnorm is 'eval' there and 'batch' here"),
        ({"precision": "bf16"}, "precision is 'float32' there and 'bf16' here"),
    ],
)
def test_a_file_of_another_surface_is_refused(changes, match, tmp_path):
    model, data, path = residual(), [images()], tmp_path / "landscape.npz"
    loss_surface(model, cross_entropy, data, points=3, path=path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"{path}.*{match}"):
        loss_surface(model, cross_entropy, data, path=path, **{"points": 3, **changes})
    with pytest.raises(ValueError, match=r"weights is .* there"):
        loss_surface(residual(1), cross_entropy, data, points=3, path=path)
    with pytest.raises(ValueError, match="rows is 20 there and 10 here; data is"):
        loss_surface(model, cross_entropy, [images(10)], points=3, path=path)
    assert path.read_bytes() == before


def each(outputs, y):
    return cross_entropy(outputs, y, reduction="none")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"points": 1}, "points.*got 1$"),
        ({"points": "3"}, "points.*got '3'"),
        ({"points": 2.5}, r"points.*got 2\.5"),
        ({"span": 0.0}, r"span.*got 0\.0"),
        ({"span": float("nan")}, "span.*got nan"),
        ({"span": "1"}, "span.*got '1'"),
        ({"batchnorm": "train"}, "batchnorm.*got 'train'"),
        ({"precision": "fp8"}, "precision.*got 'fp8'"),
        ({"path": "landscape.json"}, r"path.*\.npz, got landscape\.json"),
        ({"batches": []}, "batches.*got 0"),
        ({"batches": [(torch.zeros(0, 3, 6, 6), torch.zeros(0))]}, "batches.*got 0"),
        ({"batches": [images()[0]]}, r"batches\[0\].*got"),
        ({"batches": [(images()[0], 3)]}, r"batches\[0\].*got \['Tensor', 'int'\]"),
        ({"model": nn.Identity()}, "model.*parameters, got Identity"),
        ({"model": nn.Identity(), "directions": random_directions(network())}, "model.*Identity"),
        ({"loss_fn": each}, r"loss_fn.*got \(20,\)"),
        ({"loss_fn": lambda outputs, y: 0.5}, r"loss_fn.*got 0\.5"),
    ],
)
def test_invalid_arguments_are_refused(arguments, match):
    arguments = {
        "model": residual(), "loss_fn": cross_entropy, "batches": [images()], **arguments
    }  # fmt: skip
    with pytest.raises(ValueError, match=match):
        loss_surface(**arguments)


def test_a_model_that_is_not_a_module_is_refused():
    with pytest.raises(TypeError, match=r"model.*got None"):
        loss_surface(None, cross_entropy, [images()])


def test_files_that_hold_no_surface_are_refused(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path / "none.npz")):
        Surface.load(tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_text("no")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'bad.npz'}.*: remove it"):
        Surface.load(tmp_path / "bad.npz")
