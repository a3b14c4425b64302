import contextlib
import dataclasses

import numpy as np
import pytest
import torch

from saltflat.train import Config, DataConfig, MethodConfig, OptimizerConfig, fast, fit, state
from saltflat.train.checkpoint import load_checkpoint
from saltflat.train.log import read_metrics
from saltflat.train.loop import Interrupted
from saltflat.train.methods import METHODS
from saltflat.train.together import fit_together


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Images that can be learned: a bright square where the label says."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 800)
    x = rng.integers(0, 120, (800, 16, 16, 3), dtype=np.uint8)
    for image, label in zip(x, y, strict=True):
        top, left = 8 * (label // 2), 8 * (label % 2)
        image[top : top + 8, left : left + 8] += 60
    path = tmp_path_factory.mktemp("data") / "squares.npz"
    np.savez(path, x_train=x[:640], y_train=y[:640], x_test=x[640:], y_test=y[640:])
    return str(path)


def config(images: str, method: str, **changes) -> Config:
    known = METHODS[method].settings()
    settings = {name: 1 for name in ("lag", "start_epoch") if name in known}
    settings |= {"looksam": {"interval": 2}, "msam": {"rho": 0.1}}.get(method, {})
    base = Config(
        data=DataConfig(images, batch_size=32, augment="basic", cutout=4),
        optimizer=OptimizerConfig(lr=0.01),
        method=MethodConfig(method, settings),
        epochs=3,
        device="cuda",
    )
    return dataclasses.replace(base, **changes)


def check_same(folder, other, rel):
    for row, expected in zip(read_metrics(folder), read_metrics(other), strict=True):
        for name in ("loss", "extra_loss", "lr"):
            assert row[name] == pytest.approx(expected[name], rel=rel, abs=1e-4), name


@pytest.mark.parametrize("method", [name for name in METHODS if name != "esam"])
def test_recorded_steps_give_the_plain_ones_numbers(method, images, tmp_path, capfd):
    fit(config(images, method), tmp_path / "recorded")
    assert "one operation at a time" not in capfd.readouterr().err
    fit(config(images, method, fast=False), tmp_path / "plain")
    check_same(tmp_path / "recorded", tmp_path / "plain", rel=0.02)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("compiled", [False, True])
def test_mesas_ways_to_see_a_batch_are_recorded(compiled, images, tmp_path, capfd):
    ways = ("another_view", "rescale", "average_std", "warmup")
    settings = {"start_epoch": 1, **dict.fromkeys(ways, True)}
    one = config(images, "mesa", compile=compiled)
    one = dataclasses.replace(one, method=MethodConfig("mesa", settings))
    fit(one, tmp_path / "recorded")
    assert "one operation at a time" not in capfd.readouterr().err
    fit(dataclasses.replace(one, fast=False), tmp_path / "plain")
    check_same(tmp_path / "recorded", tmp_path / "plain", rel=0.02)


def test_a_frozen_teacher_is_recorded(images, tmp_path, capfd):
    settings = {"start_epoch": 1, "freeze_epoch": 2, "decay": 0.9}
    one = dataclasses.replace(config(images, "mesa"), method=MethodConfig("mesa", settings))
    fit(one, tmp_path / "recorded")
    assert "one operation at a time" not in capfd.readouterr().err
    fit(dataclasses.replace(one, fast=False), tmp_path / "plain")
    check_same(tmp_path / "recorded", tmp_path / "plain", rel=0.02)
    *_, before, last = (row["teacher_accuracy"] for row in read_metrics(tmp_path / "recorded"))
    assert before == last


@pytest.mark.parametrize("method", ["saf", "mesa"])
def test_a_run_that_was_stopped_goes_on(method, images, tmp_path):
    one = config(images, method)
    with pytest.raises(Interrupted):
        fit(one, tmp_path / "stopped", stop=lambda epoch, step: (epoch, step) == (1, 8))
    fit(one, tmp_path / "stopped")
    fit(one, tmp_path / "whole")
    check_same(tmp_path / "stopped", tmp_path / "whole", rel=0.02)


def test_tracking_the_sharpness_changes_no_bit(images, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(fast, "tuned", contextlib.nullcontext)  # or cuDNN may choose anew
    one = config(images, "base", model="cifar_resnet18")
    fit(one, tmp_path / "plain")
    fit(dataclasses.replace(one, track_sharpness=1), tmp_path / "tracked")
    assert all(row["sharpness"] > 0 for row in read_metrics(tmp_path / "tracked"))
    ours, theirs = (load_checkpoint(tmp_path / name)[0] for name in ("tracked", "plain"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_in_half_precision_channels_last_and_compiled(images, tmp_path):
    one = config(images, "saf", precision="bf16", channels_last=True, compile=True)
    fit(one, tmp_path / "recorded")
    fit(dataclasses.replace(one, fast=False), tmp_path / "plain")
    check_same(tmp_path / "recorded", tmp_path / "plain", rel=0.05)


def test_a_model_that_waits_for_the_gpu_is_run_plainly(images, tmp_path, monkeypatch, capfd):
    class Waits(torch.nn.Module):
        def forward(self, x):
            return x if float(x.sum()) else -x

    build = state.build_model
    monkeypatch.setattr(
        state, "build_model", lambda *a, **k: torch.nn.Sequential(Waits(), build(*a, **k))
    )
    fit(config(images, "saf"), tmp_path / "tried")
    assert "steps are taken one operation at a time: " in capfd.readouterr().err
    fit(config(images, "saf", fast=False), tmp_path / "plain")
    check_same(tmp_path / "tried", tmp_path / "plain", rel=0.02)


def test_seeds_side_by_side_learn_what_they_learn_alone(images, tmp_path):
    runs = [(config(images, "mesa", seed=seed), tmp_path / f"seed{seed}") for seed in range(3)]
    fit_together(runs, 3, lambda *_: None)
    for one, folder in runs:
        fit(one, tmp_path / "alone" / folder.name)
        check_same(folder, tmp_path / "alone" / folder.name, rel=0.02)
