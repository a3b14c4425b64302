"""`saltflat landscape`, from runs on disk to files and pictures."""

import dataclasses
import shutil
import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from saltflat.cli import main
from saltflat.landscape import Surface
from saltflat.landscape.scale import common_scale
from saltflat.report import surfaces as plot
from saltflat.train import Config, DataConfig, MethodConfig, fit
from saltflat.train.checkpoint import load_checkpoint, load_snapshots
from saltflat.train.runs import open_run

SMALL = ["--points", "4", "--images", "40"]
CONFIG = Config(
    data=DataConfig(train_size=96, batch_size=32), epochs=4, snapshot_every=1, device="cpu"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    fit(CONFIG, folder / "base")
    method = MethodConfig("saf", {"lag": 1, "start_epoch": 1})
    fit(dataclasses.replace(CONFIG, method=method), folder / "saf")
    other = {"model": "test_resnet", "epochs": 1, "snapshot_every": 0}
    fit(dataclasses.replace(CONFIG, **other), folder / "resnet")
    return folder


@pytest.fixture
def runs(trained, tmp_path):
    """Copies of their own, by name."""
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs"


def landscape(*arguments):
    main(["landscape", *map(str, arguments)])


def own_loss(run, images=40):
    opened = open_run(run)
    with torch.no_grad():
        return np.mean(
            [cross_entropy(opened.model(x), y).item() for x, y in opened.batches(images)]
        )


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        landscape(*arguments)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_planes_of_two_runs_and_their_pictures(runs, capsys):
    pictures = runs / "pictures"
    landscape(runs / "base", runs / "saf", *SMALL, "--seed", 3, "--figures", pictures)
    out = capsys.readouterr().out
    for name in ("base", "saf"):
        surface = Surface.load(runs / name / "landscape.npz")
        assert surface.complete
        assert surface.losses.shape == (4, 4)
        assert surface.provenance["origin_loss"] == pytest.approx(own_loss(runs / name), rel=1e-5)
        assert surface.provenance["title"] == f"{name}, seed 0"
        assert surface.provenance["settings"]["seed"] == 3
        assert surface.provenance["settings"]["rows"] == 40
        assert surface.provenance["command"].startswith("saltflat landscape base saf --points 4")
        assert str(runs / name / "landscape.npz") in out
    assert sorted(path.name for path in pictures.iterdir()) == [
        f"landscape_plane_{kind}" for kind in
        ("contours.png", "contours.svg", "surfaces.png", "surfaces.svg")
    ]  # fmt: skip
    assert all(path.stat().st_size > 5000 for path in pictures.iterdir())
    svg = (pictures / "landscape_plane_contours.svg").read_text()
    assert "saf, seed 0" in svg


def test_a_line_between_two_runs(runs):
    landscape(runs / "base", runs / "saf", *SMALL, "--mode", "between", "--figures", runs)
    surface = Surface.load(runs / "base" / "landscape_to_saf_seed0.npz")
    ends = [own_loss(runs / name) for name in ("base", "saf")]
    assert surface.losses[[0, -1]] == pytest.approx(ends, rel=1e-5)
    assert (runs / "landscape_between_lines.svg").exists()


def test_the_plane_of_a_trajectory(runs):
    kept = load_snapshots(runs / "base")
    assert list(kept) == [0, 1, 2, 3]
    landscape(runs / "base", *SMALL, "--mode", "trajectory", "--figures", runs)
    surface = Surface.load(runs / "base" / "landscape_trajectory.npz")
    assert surface.marks.shape == (5, 2)
    assert surface.provenance["settings"]["batchnorm"] == "batch"
    last = load_checkpoint(runs / "base")[0]
    names = [name for name, _ in open_run(runs / "base").model.named_parameters()]
    way = sum(((kept[0][name] - last[name]) ** 2).sum().item() for name in names) ** 0.5
    assert 0.9 * way < np.linalg.norm(surface.marks[0]) <= way * (1 + 1e-5)
    assert (runs / "landscape_trajectory_contours.png").exists()


def test_a_line_goes_where_it_is_told(runs):
    out = runs / "line.npz"
    landscape(runs / "base", *SMALL, "--mode", "line", "--span", 0.5, "--out", out)
    assert Surface.load(out).x.tolist() == pytest.approx([-0.5, -1 / 6, 1 / 6, 0.5])
    assert not (runs / "base" / "landscape_line.npz").exists()


def test_a_terminal_shows_the_points_done_and_the_time_left(runs, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    landscape(runs / "base", *SMALL)
    shown = capsys.readouterr().err
    assert all(part in shown for part in ("base, seed 0", "16/16", "0:00:00"))


def test_ctrl_c_saves_and_the_same_command_goes_on(runs, monkeypatch, capsys):
    from saltflat.landscape import surface

    monkeypatch.setattr(surface, "_CHUNK", 4)
    monkeypatch.setattr(surface, "_LOOK_SECONDS", 1e9)
    evaluate, calls = surface.SurfaceEvaluator.__call__, []

    def interrupted(self, points):
        calls.append(len(points))
        if calls.count(4) == 3:
            raise KeyboardInterrupt
        return evaluate(self, points)

    monkeypatch.setattr(surface.SurfaceEvaluator, "__call__", interrupted)
    with pytest.raises(SystemExit) as exit_:
        landscape(runs / "base", *SMALL)
    assert exit_.value.code == 130
    assert "stopped and saved; the same command goes on" in capsys.readouterr().out
    path = runs / "base" / "landscape.npz"
    assert Surface.load(path).done == 9
    with pytest.raises(ValueError, match=r"surfaces.*'a' with 9 of 16 points"):
        plot.contours({"a": Surface.load(path)})
    monkeypatch.setattr(surface.SurfaceEvaluator, "__call__", evaluate)
    landscape(runs / "base", *SMALL)
    assert Surface.load(path).complete
    error = refused(capsys, runs / "base", *SMALL, "--seed", 1)
    assert "seed is 0 there and 1 here)" in error


def test_bad_input_is_told_what_to_do(runs, capsys, monkeypatch):
    base, saf, resnet = (runs / name for name in ("base", "saf", "resnet"))
    between = ["--mode", "between"]
    assert "holds no run" in refused(capsys, runs / "none")
    assert "points must be an integer >= 2, got 1" in refused(capsys, base, "--points", 1)
    assert "span must be a positive number, got 0" in refused(capsys, base, "--span", 0)
    assert "two runs of one model, got" in refused(capsys, base, resnet, *between)
    assert "two runs of one model, got" in refused(capsys, base, *between)
    assert "--out is for one surface, and there are 2" in refused(
        capsys, base, saf, "--out", "a.npz"
    )
    error = refused(capsys, resnet, "--mode", "trajectory")
    assert f"{resnet}: snapshots" in error and "got 0: train with snapshot_every set" in error
    assert "unknown option --point" in refused(capsys, base, "--point", 3)
    shutil.rmtree(base / "checkpoints")
    assert "has no checkpoint yet: train it" in refused(capsys, base)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "saltflat.report")
    monkeypatch.delitem(sys.modules, "saltflat.report.surfaces")
    error = refused(capsys, saf, *SMALL, "--figures", runs)
    assert "pip install 'saltflat[report]'" in error
    assert not (saf / "landscape.npz").exists()


def test_snapshots_are_the_weights_with_which_epochs_begin(tmp_path):
    def stop(epoch, step):
        if (epoch, step) == (2, 1):
            raise KeyError

    config = dataclasses.replace(CONFIG, snapshot_every=2)
    with pytest.raises(KeyError):
        fit(config, tmp_path / "killed", stop=stop)
    fit(config, tmp_path / "killed")
    fit(dataclasses.replace(config, epochs=4), tmp_path / "whole")
    killed, whole = (load_snapshots(tmp_path / name) for name in ("killed", "whole"))
    assert list(killed) == list(whole) == [0, 2]
    for epoch, weights in whole.items():
        assert all(torch.equal(t, killed[epoch][name]) for name, t in weights.items())
    assert not torch.equal(whole[0]["0.0.weight"], whole[2]["0.0.weight"])
    with pytest.raises(ValueError, match="snapshot_every must be 0 or more, got -1"):
        dataclasses.replace(CONFIG, snapshot_every=-1)


def surface_of(losses):
    size = np.linspace(-1, 1, losses.shape[0])
    y = size if losses.ndim == 2 else None
    about = {"settings": {"kind": "random"}}
    return Surface(size, y, losses, None, np.zeros((1, losses.ndim)), about, losses.size)


def test_surfaces_in_a_picture_have_one_scale():
    steep, flat = (
        surface_of(height * np.add.outer(np.linspace(-1, 1, 9) ** 2, np.linspace(-1, 1, 9) ** 2))
        for height in (100, 2)
    )
    scale = common_scale([steep.losses, flat.losses])
    assert scale.top == scale.levels[-1] == 2
    assert scale.top <= np.quantile(flat.losses, 0.75) < 5
    for figure in (
        plot.contours({"a": steep, "b": flat}),
        plot.surfaces_3d({"a": steep, "b": flat}),
    ):
        panels = figure.axes
        assert [axes.get_title() for axes in panels] == ["a", "b"]
        if hasattr(panels[0], "get_zlim"):
            assert panels[0].get_zlim() == panels[1].get_zlim() == (scale.bottom, scale.top)
    levels = [
        [c.levels.tolist() for c in axes.collections if hasattr(c, "levels")][-1]
        for axes in plot.contours({"a": steep, "b": flat}).axes
    ]
    assert levels[0] == levels[1] == list(scale.levels)


def test_steep_lines_are_drawn_on_a_logarithmic_axis():
    steep, flat = (surface_of(1 + h * np.linspace(-1, 1, 9) ** 2) for h in (100, 1))
    assert plot.lines({"a": steep}).axes[0].get_yscale() == "log"
    both = plot.lines({"a": flat, "b": flat}).axes[0]
    assert both.get_yscale() == "linear"
    assert [text.get_text() for text in both.get_legend().get_texts()] == ["a", "b"]


def test_what_cannot_be_drawn():
    grid, line = surface_of(np.ones((3, 3))), surface_of(np.ones(3))
    with pytest.raises(ValueError, match=r"surfaces.*got 'b' of 1 dimensions"):
        plot.contours({"a": grid, "b": line})
    with pytest.raises(ValueError, match=r"losses.*got none: .*smaller span"):
        plot.contours({"a": surface_of(np.full((3, 3), np.nan))})
    assert plot.contours({"a": grid}).axes  # a plain


@pytest.mark.parametrize("rise", [1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
def test_a_loss_that_hardly_rises_has_levels_that_read_differently(rise):
    grid = 2.302585 + rise * np.add.outer(np.linspace(-1, 1, 9) ** 2, np.linspace(-1, 1, 9) ** 2)
    levels = common_scale([grid]).levels
    assert len(levels) > 3 and len({f"{level:g}" for level in levels}) == len(levels)
    assert list(levels) == sorted(levels)
    for draw in (plot.contours, plot.surfaces_3d):
        assert draw({"a": surface_of(grid)}).axes


def test_a_path_can_be_seen_on_any_ground():
    (axes,) = plot.contours({"a": surface_of(np.add.outer(np.arange(3.0), np.arange(3.0)))}).axes
    assert len(axes.lines) == 2 and all(line.get_path_effects() for line in axes.lines)


def test_losses_that_are_not_numbers_leave_holes():
    losses = np.add.outer(np.arange(5.0), np.arange(5.0))
    losses[0, 0], losses[4, 4] = np.nan, np.inf
    assert common_scale([losses]).bottom == 1
    for draw in (plot.contours, plot.surfaces_3d):
        assert draw({"a": surface_of(losses)}).axes
