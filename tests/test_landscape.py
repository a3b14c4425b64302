import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tape
import torch
from problems import dataset, network
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from saltflat.core import cuda_graph
from saltflat.core.perturb import displaced
from saltflat.landscape import (
    Surface,
    _evaluate,
    _moving,
    _trial,
    line_between,
    loss_surface,
    random_directions,
    surface,
    trajectory_plane,
)
from saltflat.landscape._progress import TimeLeft


class Residual(nn.Module):
    """What a network for images has: convolutions that fold and one that does not, a sum, tied
    weights, a buffer that is no statistic."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.again = self.body[0]
        self.point = nn.Conv2d(8, 6, 1)
        self.head = nn.Linear(6, 5)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(x + self.body(x)) + self.again(x)
        return self.head(self.point(x).mean((2, 3))) * self.scale


def images(rows=20):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 3, 6, 6, generator=generator)
    return x, torch.randint(5, (rows,), generator=generator)


def used(model, x, y, seed=0):
    """The model after some steps: with statistics, gradients and flags of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        cross_entropy(model(x + 0.1 * seed), y).backward()
        optimizer.step()
    return model


def residual(seed=0):
    torch.manual_seed(seed)
    return used(Residual(), *images(), seed)


def one_at_a_time(model, x, y, directions, places, *, batch=False):
    """The definition: displace the model's tensors, compute, come back."""
    named = dict([*model.named_parameters(), *model.named_buffers()])
    modes = {module: module.training for module in model.modules()}
    found = []
    for place in places.tolist():
        tensors = [named[name] for name in directions.axes[0]]
        offsets = [
            sum(c * axis[name] for c, axis in zip(place, directions.axes, strict=True))
            for name in directions.axes[0]
        ]
        model.eval()
        for module in model.modules():
            if batch and isinstance(module, nn.BatchNorm2d):
                module.train()
                module.track_running_stats = False
        with torch.no_grad(), displaced(tensors, offsets):
            outputs = model(x)
        for module, mode in modes.items():
            module.training = mode
            if isinstance(module, nn.BatchNorm2d):
                module.track_running_stats = True
        right = (outputs.argmax(1) == y).double().mean()
        found.append([cross_entropy(outputs, y).item(), 100 * right.item()])
    return np.array(found)


def coordinates(one):
    if one.y is None:
        return torch.from_numpy(one.x)[:, None]
    return torch.tensor([[a, b] for b, a in product(one.y, one.x)])


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
    for place in coordinates(found).tolist():
        moved = w + sum(c * axis["weight"] for c, axis in zip(place, directions.axes, strict=True))
        expected.append(((x @ moved.T + bias - y) ** 2).mean().item())
    assert found.losses.shape == (7,) * count
    assert found.losses.ravel() == pytest.approx(np.array(expected), rel=1e-12)
    assert found.x.tolist() == np.linspace(-2.5, 2.5, 7).tolist()
    assert found.accuracies is None
    assert found.complete


def test_filters_of_a_direction_are_as_long_as_the_models():
    model = residual()
    model.point.weight.data[2] = 0
    for axis in random_directions(model, seed=1).axes:
        assert axis.keys() == {"stem.0.weight", "body.0.weight", "point.weight", "head.weight"}
        for name, direction in axis.items():
            weight = model.get_parameter(name).detach()
            assert torch.allclose(direction.flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1))
            assert direction.shape == weight.shape


def test_models_of_one_architecture_get_one_draw(device):
    first, second = residual(0), residual(1).to(device)
    for axis, other in zip(
        random_directions(first, seed=4).axes, random_directions(second, seed=4).axes, strict=True
    ):
        for name, direction in axis.items():
            normed, theirs = (
                d / d.flatten(1).norm(dim=1).view(-1, *[1] * (d.dim() - 1))
                for d in (direction, other[name].cpu())
            )
            assert torch.allclose(normed, theirs, atol=1e-6)


def test_a_seed_is_a_direction_and_a_line_is_the_planes_first():
    model = residual()
    (line,) = random_directions(model, seed=4, count=1).axes
    plane = random_directions(model, seed=4).axes
    other = random_directions(model, seed=5).axes
    assert torch.equal(line["head.weight"], plane[0]["head.weight"])
    cosines = [
        torch.cosine_similarity(one["body.0.weight"].flatten(), two["body.0.weight"].flatten(), 0)
        for one, two in [plane, (plane[0], other[0])]
    ]
    assert max(map(abs, cosines)) < 0.2


@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
@pytest.mark.parametrize("sizes", [(20,), (7, 13)])
def test_losses_and_accuracies_are_those_of_one_weight_at_a_time(batchnorm, sizes, device):
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
    assert found.provenance["apart"]["relative"] < rel
    assert ("folded" in found.provenance["how"]) == (batchnorm == "eval")
    assert found.provenance["origin_loss"] == pytest.approx(
        one_at_a_time(model, x, y, directions, torch.zeros(1, 2), batch=batchnorm == "batch")[0, 0],
        rel=rel,
    )


def test_rows_are_taken_in_parts_on_a_cpu(monkeypatch):
    model, data = residual(), [images()]
    whole = loss_surface(model, cross_entropy, data, points=3)
    monkeypatch.setattr(_moving, "_CPU_ROWS", 6)
    parts = loss_surface(model, cross_entropy, data, points=3)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.fixture
def recorded(monkeypatch):
    """Record on the CPU, as on a GPU; counts replays."""
    replays = []

    def record(body, pool):
        monkeypatch.setattr(cuda_graph, "capturing", lambda: True)
        replay = tape.record(body)
        monkeypatch.setattr(cuda_graph, "capturing", lambda: False)
        return lambda: replays.append(replay())

    monkeypatch.setattr(_evaluate, "can_record", lambda device: True)
    monkeypatch.setattr(_evaluate, "record", record)
    return replays


@pytest.mark.parametrize("chunk", [128, 4])
def test_a_recording_gives_the_same(chunk, recorded, monkeypatch):
    monkeypatch.setattr(_evaluate, "CHUNK", chunk)
    model, (x, y) = residual(), images()
    directions = random_directions(model)
    places = _evaluate.Places(
        model, cross_entropy, [(x, y)], directions, batchnorm="eval", half=False
    )
    places.record()
    at = torch.randn(11, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = one_at_a_time(model, x, y, directions, at)
    assert places(at)[:, 0].numpy() == pytest.approx(expected[:, 0], rel=1e-4)
    assert len(recorded) == 11
    assert places(at[:1])[0, 0] == pytest.approx(expected[0, 0], rel=1e-4)


def test_what_cannot_be_recorded_is_computed_all_the_same(recorded, monkeypatch, capsys):
    def refuse(body, pool):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model, data = residual(), [images()]
    expected = loss_surface(model, cross_entropy, data, points=3)
    monkeypatch.setattr(_evaluate, "record", refuse)
    found = loss_surface(model, cross_entropy, data, points=3)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert capsys.readouterr().err == (
        "places are taken one operation at a time: "
        "operation not permitted when stream is capturing\n"
    )
    assert "recorded" not in found.provenance["how"]


def test_a_model_that_cannot_be_traced_runs_itself():
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


def test_half_precision_stays_within_what_it_promises():
    model, data = residual(), [images()]
    exact = loss_surface(model, cross_entropy, data, points=4)
    half = loss_surface(model, cross_entropy, data, points=4, precision="bf16")
    absolute, relative = _trial.TOLERANCE
    assert (np.abs(half.losses - exact.losses) <= absolute + relative * exact.losses).all()
    assert not np.array_equal(half.losses, exact.losses)
    assert half.provenance["how"].startswith("bf16")
    assert 0 < half.provenance["apart"]["absolute"] < 0.1


def test_where_half_precision_is_too_coarse_it_is_not_used(monkeypatch):
    def steep(outputs, y):
        return cross_entropy(outputs, y) + 100 * (outputs[0, 0] - outputs[0, 1]) ** 2

    model, data = residual(), [images()]
    exact = loss_surface(model, steep, data, points=3)
    monkeypatch.setattr(_trial, "TOLERANCE", (1e-5, 1e-5))
    monkeypatch.setattr(surface, "_resolved", lambda *_: "bf16")  # as on a GPU
    found = loss_surface(model, steep, data, points=3)
    assert found.provenance["how"].startswith("float32")
    assert np.array_equal(found.losses, exact.losses)
    asked = loss_surface(model, steep, data, points=3, precision="bf16")
    assert asked.provenance["how"].startswith("bf16")


def everything(model):
    """All that could have changed, and a copy of it."""
    copied = lambda t: None if t is None else t.clone()  # noqa: E731
    return {
        **{f"state {name}": copied(t) for name, t in model.state_dict().items()},
        **{f"grad {name}": copied(p.grad) for name, p in model.named_parameters()},
        **{f"asks {name}": p.requires_grad for name, p in model.named_parameters()},
        **{f"place {name}": t.data_ptr() for name, t in model.state_dict().items()},
        **{f"stride {name}": t.stride() for name, t in model.state_dict().items()},
        **{f"training {name}": m.training for name, m in model.named_modules()},
        "tracks": model.stem[1].track_running_stats,
        "random": torch.get_rng_state(),
        "benchmark": torch.backends.cudnn.benchmark,
    }


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


def test_a_line_may_go_on_to_where_a_variance_would_be_negative():
    first, second = residual(0), residual(1)
    second.stem[1].running_var *= 0.1
    found = loss_surface(
        first, cross_entropy, [images()], directions=line_between(first, second), points=9, span=5
    )
    assert (found.x[0], found.x[-1]) == (-2, 3)
    assert np.isfinite(found.losses).all()


def snapshots(model, count, spread=0.3):
    """Weights around a model's, statistics included."""
    generator = torch.Generator().manual_seed(1)

    def near(t):
        return t + spread * t.abs().mean() * torch.rand(t.shape, generator=generator)

    found = []
    for _ in range(count):
        other = Residual()  # in which tied weights stay so
        state = model.state_dict().items()
        other.load_state_dict({n: near(t) if t.is_floating_point() else t for n, t in state})
        found.append(other.state_dict())
    return found


def flat(model, state):
    return torch.cat([state[name].flatten().double() for name, _ in model.named_parameters()])


def test_a_trajectory_lies_in_its_plane():
    model, (x, y) = residual(), images()
    one, two = snapshots(model, 2)
    # A third in the plane of these and the model: statistics go along.
    final = model.state_dict()
    three = {n: 0.5 * one[n] + 0.25 * two[n] + 0.25 * t for n, t in final.items()}
    path = [one, three, two]
    plane = trajectory_plane(model, path)
    axes = [flat(model, {**axis}) for axis in plane.axes]
    gram = torch.stack(axes) @ torch.stack(axes).T
    assert torch.allclose(gram, torch.eye(2, dtype=torch.float64), atol=1e-5)
    assert sum(plane.explained) == pytest.approx(1)
    assert plane.marks.shape == (4, 2)
    assert plane.marks[-1].tolist() == [0, 0]
    assert (plane.marks[0] >= 0).all()
    for snapshot, (a, b) in zip(path, plane.marks, strict=False):
        there = flat(model, final) + a * axes[0] + b * axes[1]
        assert torch.allclose(there, flat(model, snapshot), atol=1e-5)
    places = _evaluate.Places(model, cross_entropy, [(x, y)], plane, batchnorm="eval", half=False)
    losses = places(torch.from_numpy(plane.marks))[:, 0]
    for snapshot, loss in zip([*path, final], losses, strict=True):
        other = Residual()
        other.load_state_dict(snapshot)
        assert loss == pytest.approx(cross_entropy(other.eval()(x), y).item(), rel=1e-4)
    drawn = loss_surface(model, cross_entropy, [(x, y)], directions=plane, points=4)
    assert drawn.x[0] < plane.marks[:, 0].min() < plane.marks[:, 0].max() < drawn.x[-1]
    assert drawn.y[0] < plane.marks[:, 1].min() < plane.marks[:, 1].max() < drawn.y[-1]
    assert drawn.provenance["explained"] == pytest.approx(plane.explained)


def test_the_plane_is_the_nearest_of_all():
    model = residual()
    path = snapshots(model, 6)
    plane = trajectory_plane(model, path)
    rows = torch.stack([flat(model, s) for s in path]) - flat(model, model.state_dict())
    _, lengths, vectors = np.linalg.svd(rows.numpy(), full_matrices=False)
    for axis, vector in zip(plane.axes, vectors, strict=False):
        assert abs(flat(model, axis).numpy() @ vector) == pytest.approx(1, abs=1e-5)
    shares = lengths**2 / (lengths**2).sum()
    assert plane.explained == pytest.approx(shares[:2])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_makes_no_plane(count):
    model = residual()
    (one,) = snapshots(model, 1)
    line = [
        {n: t + k * (one[n] - t) for n, t in model.state_dict().items()}
        for k in range(1, count + 1)
    ]
    with pytest.raises(ValueError, match=f"{count} snapshots make no plane.*snapshot_every"):
        trajectory_plane(model, line)


def test_a_file_keeps_all(tmp_path):
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
from test_landscape import images, residual, cross_entropy
from saltflat.landscape import loss_surface, surface

torch.set_num_threads(int(sys.argv[3]))
surface.CHUNK, surface._SAVE_SECONDS, surface._LOOK_SECONDS = 5, 0.0, 1e9
calls = []

def progress(done, total):
    calls.append(done)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)

loss_surface(residual(), cross_entropy, [images()], points=6, path=sys.argv[1], progress=progress)
"""


def test_a_surface_that_was_killed_goes_on_to_be_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(surface, "_LOOK_SECONDS", 1e9)
    path, seen = tmp_path / "landscape.npz", []
    here, threads = str(Path(__file__).parent), str(torch.get_num_threads())
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
    monkeypatch.setattr(surface, "CHUNK", 4)
    monkeypatch.setattr(surface, "_LOOK_SECONDS", 1e9)
    model, data, path = residual(), [images()], tmp_path / "new" / "landscape.npz"

    def stop(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loss_surface(model, cross_entropy, data, points=3, path=path, progress=stop)
    assert Surface.load(path).done == 5
    assert loss_surface(model, cross_entropy, data, points=3, path=path).complete


def test_slow_places_are_looked_at_one_by_one(monkeypatch):
    seen = []
    for seconds in (0.0, 1e9):
        monkeypatch.setattr(surface, "_LOOK_SECONDS", seconds)
        loss_surface(
            network(), cross_entropy, [dataset().tensors], points=13,
            progress=lambda done, total: seen.append(done),
        )  # fmt: skip
    assert seen == [*range(1, 170), 1, 129, 169]


def test_a_complete_one_is_not_computed_again(tmp_path):
    model, data, path = residual(), [images()], tmp_path / "landscape.npz"
    made = loss_surface(model, cross_entropy, data, points=3, path=path)

    def never(outputs, y):
        raise AssertionError

    assert np.array_equal(loss_surface(model, never, data, points=3, path=path).losses, made.losses)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"points": 4}, "points is 3 there and 4 here"),
        ({"span": 0.5}, "span is 1.0 there and 0.5 here"),
        ({"batchnorm": "batch"}, "batchnorm is 'eval' there and 'batch' here"),
        ({"precision": "bf16"}, "precision is 'float32' there and 'bf16' here"),
    ],
)
def test_a_file_of_another_surface_is_left_alone(changes, said, tmp_path):
    model, data, path = residual(), [images()], tmp_path / "landscape.npz"
    loss_surface(model, cross_entropy, data, points=3, path=path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"holds another surface \({said}\): remove it"):
        loss_surface(model, cross_entropy, data, path=path, **{"points": 3, **changes})
    with pytest.raises(ValueError, match=r"weights is .* there"):
        loss_surface(residual(1), cross_entropy, data, points=3, path=path)
    with pytest.raises(ValueError, match="rows is 20 there and 10 here; data is"):
        loss_surface(model, cross_entropy, [images(10)], points=3, path=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"points": 1}, "points must be at least 2, got 1"),
        ({"span": 0.0}, "span must be positive, got 0.0"),
        ({"span": float("nan")}, "span must be positive, got nan"),
        ({"batchnorm": "train"}, "batchnorm must be one of eval, batch, got 'train'"),
        ({"precision": "fp8"}, "precision must be one of auto, float32, bf16, got 'fp8'"),
        ({"path": "landscape.json"}, "ends in .npz, got landscape.json"),
        ({"batches": []}, "batches are empty"),
    ],
)
def test_bad_arguments(arguments, said):
    arguments = {"batches": [images()], **arguments}
    with pytest.raises(ValueError, match=said):
        loss_surface(residual(), cross_entropy, **arguments)


def test_bad_directions_and_files(tmp_path):
    with pytest.raises(ValueError, match="count must be 1, a line, or 2, a plane; got 3"):
        random_directions(residual(), count=3)
    with pytest.raises(ValueError, match="no weight of two dimensions"):
        random_directions(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"different models \(.* tensors differ, as "):
        line_between(residual(), network())
    with pytest.raises(ValueError, match="different models"):
        trajectory_plane(residual(), [network().state_dict()] * 3)
    with pytest.raises(ValueError, match="there is no surface at"):
        Surface.load(tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_text("no")
    with pytest.raises(ValueError, match=r"is not a surface's file .*: remove it"):
        Surface.load(tmp_path / "bad.npz")


def test_time_left_is_said_now_and_then(capsys):
    class Terminal:
        text = ""

        def isatty(self):
            return True

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    now, stream = [0.0], Terminal()
    shown = TimeLeft("a", stream, clock=lambda: now[0])
    for now[0], done in ((1.0, 100), (1.1, 150), (3.0, 300), (1000.0, 400), (4000.0, 1000)):
        shown(done, 1000)
    said = [line.strip() for line in stream.text.split("\r") if line]
    assert said == [
        "a: 100 of 1,000 places",
        "a: 300 of 1,000 places, 7 s left",
        "a: 400 of 1,000 places, 33 min left",
        "a: 1,000 of 1,000 places",
    ]
    shown = TimeLeft("b", clock=lambda: now[0])
    for now[0], done in ((4001.0, 1), (4029.0, 2), (4031.0, 3), (4032.0, 4)):
        shown(done, 4)
    assert capsys.readouterr().err == "b: 3 of 4 places, 15 s left\nb: 4 of 4 places\n"
