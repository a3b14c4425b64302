import contextlib
import dataclasses
from itertools import islice

import pytest
import tape
import torch

from saltflat.core import cuda_graph
from saltflat.train import (
    Config,
    DataConfig,
    Interrupted,
    MethodConfig,
    OptimizerConfig,
    fast,
    fit,
    state,
    together,
)
from saltflat.train.checkpoint import load_checkpoint
from saltflat.train.data import load_data
from saltflat.train.log import read_metrics
from saltflat.train.methods import METHODS
from saltflat.train.models import build_model
from saltflat.train.together import fit_together


def config(method: str = "base", **changes) -> Config:
    known = METHODS[method].settings()
    # A small rho for MSAM: from three times that, rounding becomes another run in a few steps.
    early = {"lag": 1, "start_epoch": 1}
    early |= {"looksam": {"interval": 2}, "msam": {"rho": 0.1}}.get(method, {})
    settings = {name: value for name, value in early.items() if name in known}
    base = Config(
        data=DataConfig(train_size=160, batch_size=16, augment="basic", cutout=3),
        optimizer=OptimizerConfig(lr=0.02, warmup_epochs=0.5),
        method=MethodConfig(method, settings),
        epochs=3,
        device="cpu",
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture
def recorded(monkeypatch):
    """Record on the CPU; counts what is recorded and replayed."""
    counts = {"recorded": 0, "replayed": 0}

    def record(body, pool):
        monkeypatch.setattr(cuda_graph, "capturing", lambda: True)
        replay = tape.record(body)
        monkeypatch.setattr(cuda_graph, "capturing", lambda: False)
        counts["recorded"] += 1

        def counted():
            counts["replayed"] += 1
            replay()

        return counted

    monkeypatch.setattr(state, "why_plain", lambda *_: None)
    monkeypatch.setattr(fast, "record", record)
    return counts


def same_figures(folder, other, rel=1e-4, images=1, epochs=None):
    """Compare the first epochs of two runs; rounding may flip so many images of each set."""
    rows = zip(read_metrics(folder), read_metrics(other), strict=True)
    for row, expected in islice(rows, epochs):
        for name in ("loss", "extra_loss", "lr"):
            assert row[name] == pytest.approx(expected[name], rel=rel, abs=1e-6), name
        for name, size in {"train_accuracy": 160, "accuracy": 1637}.items():
            assert row[name] == pytest.approx(expected[name], abs=101 * images / size), name


@pytest.mark.parametrize("method", [name for name in METHODS if name != "esam"])
def test_recorded_steps_are_plain_steps(method, recorded, tmp_path, monkeypatch):
    run = fit(config(method), tmp_path / "recorded")
    kinds = 2 if "start_epoch" in METHODS[method].settings() or method == "looksam" else 1
    assert recorded["recorded"] == kinds
    assert recorded["replayed"] == 30 - 3 * kinds
    monkeypatch.undo()
    plain = fit(config(method), tmp_path / "plain")
    same_figures(tmp_path / "recorded", tmp_path / "plain")
    assert run.extra_bytes == plain.extra_bytes
    assert run.teacher_accuracy == pytest.approx(plain.teacher_accuracy)


@pytest.mark.parametrize("method", ["base", "mesa"])
def test_tracking_the_sharpness_leaves_recorded_steps_as_they_are(method, recorded, tmp_path):
    fit(config(method), tmp_path / "plain")
    fit(config(method, track_sharpness=1), tmp_path / "tracked")
    assert all(row["sharpness"] > 0 for row in read_metrics(tmp_path / "tracked"))
    ours, theirs = (load_checkpoint(tmp_path / name)[0] for name in ("tracked", "plain"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_accumulation_clipping_and_adamw_are_recorded_too(recorded, tmp_path, monkeypatch):
    optimizer = OptimizerConfig(name="adamw", lr=0.002, accumulate=2, clip_norm=0.5)
    fit(config("saf", optimizer=optimizer), tmp_path / "recorded")
    assert recorded["replayed"] == 24
    monkeypatch.undo()
    fit(config("saf", optimizer=optimizer), tmp_path / "plain")
    same_figures(tmp_path / "recorded", tmp_path / "plain", rel=1e-3)


def test_mesas_ways_to_see_a_batch_are_recorded(recorded, tmp_path, monkeypatch):
    ways = dict.fromkeys(("another_view", "rescale", "average_std", "warmup"), True)

    def mesa(**changes):
        method = MethodConfig("mesa", {"start_epoch": 1, **ways, **changes})
        optimizer = OptimizerConfig(lr=0.05, warmup_epochs=0.5)
        return dataclasses.replace(config("mesa"), method=method, optimizer=optimizer)

    fit(mesa(), tmp_path / "recorded")
    assert (recorded["recorded"], recorded["replayed"]) == (2, 24)
    monkeypatch.undo()
    fit(mesa(), tmp_path / "plain")
    same_figures(tmp_path / "recorded", tmp_path / "plain")
    for name in ways:
        fit(mesa(**{name: False}), tmp_path / name)
        ours, theirs = (read_metrics(tmp_path / run)[-1] for run in ("plain", name))
        assert ours["extra_loss"] != pytest.approx(theirs["extra_loss"], rel=1e-3)


def test_steps_in_which_mesa_does_other_things_are_recorded_apart(recorded, tmp_path, monkeypatch):
    kinds = 3
    method = MethodConfig("mesa", {"start_epoch": 1, "freeze_epoch": 2, "decay": 0.9})
    mesa = dataclasses.replace(config("mesa"), method=method)
    fit(mesa, tmp_path / "recorded")
    assert (recorded["recorded"], recorded["replayed"]) == (kinds, 30 - 3 * kinds)
    monkeypatch.undo()
    fit(mesa, tmp_path / "plain")
    same_figures(tmp_path / "recorded", tmp_path / "plain")
    mine, plain = (load_checkpoint(tmp_path / name)[1] for name in ("recorded", "plain"))
    assert _updates(mine) == _updates(plain)
    first, before, last = read_metrics(tmp_path / "recorded")
    assert first["extra_loss"] == 0 < last["extra_loss"]
    assert before["teacher_accuracy"] == last["teacher_accuracy"]


@pytest.mark.parametrize("method", ["looksam", "saf", "mesa", "ema"])
def test_a_long_recorded_run_stays_a_plain_one(method, recorded, tmp_path, monkeypatch):
    long = config(method, epochs=9)
    fit(long, tmp_path / "recorded")
    monkeypatch.undo()
    fit(long, tmp_path / "plain")
    # LookSAM reuses one direction for five steps, by which rounding grows.
    epochs = 3 if method == "looksam" else None
    same_figures(tmp_path / "recorded", tmp_path / "plain", rel=2e-3, images=16, epochs=epochs)
    mine, plain = (load_checkpoint(tmp_path / name)[1] for name in ("recorded", "plain"))
    assert _updates(mine) == _updates(plain)


def _updates(state):
    """What a run has counted, in the parts of its state that count."""
    training = state["training"]
    counted = [training["optimizer"].get("method", {}).get("steps")]
    extra = {k: v for k, v in training.get("method", {}).items() if k.endswith("_extra_state")}
    return counted, {name: int(value.flatten()[0]) for name, value in extra.items()}


@pytest.mark.parametrize("method", ["looksam", "saf", "mesa"])
def test_a_recorded_run_goes_on_where_it_stopped(method, recorded, tmp_path):
    fit(config(method), tmp_path / "straight")
    with pytest.raises(Interrupted):
        fit(config(method), tmp_path / "broken", stop=lambda epoch, step: (epoch, step) == (1, 6))
    fit(config(method), tmp_path / "broken")
    same_figures(tmp_path / "broken", tmp_path / "straight")


def test_a_recorded_run_can_go_on_plain_and_back(recorded, tmp_path, monkeypatch):
    with pytest.raises(Interrupted):
        fit(config("mesa"), tmp_path / "run", stop=lambda epoch, step: (epoch, step) == (0, 7))
    with monkeypatch.context() as plain:
        plain.setattr(state, "why_plain", lambda *_: "a test")
        with pytest.raises(Interrupted):
            fit(config("mesa"), tmp_path / "run", stop=lambda epoch, step: (epoch, step) == (1, 7))
    before = recorded["replayed"]
    fit(config("mesa"), tmp_path / "run")
    assert recorded["replayed"] > before
    monkeypatch.undo()
    fit(config("mesa"), tmp_path / "plain")
    same_figures(tmp_path / "run", tmp_path / "plain")


def test_what_cannot_be_recorded_is_run_plainly_and_said(recorded, tmp_path, monkeypatch, capsys):
    def record(body, pool):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(fast, "record", record)
    fit(config(), tmp_path / "tried")
    said = "one operation at a time: operation not permitted when stream is capturing\n"
    assert capsys.readouterr().err.endswith(said)
    monkeypatch.undo()
    fit(config(), tmp_path / "plain")
    same_figures(tmp_path / "tried", tmp_path / "plain")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fast": False}, "the config says so"),
        ({"device": "cpu"}, "there is no GPU"),
        ({"data": DataConfig(mixup=0.2)}, "mixup is chosen"),
        ({"data": DataConfig(augment="inception")}, "resizes images one by one"),
        ({"method": MethodConfig("esam")}, "esam chooses tensors and rows in Python"),
        ({"method": MethodConfig("saf", {"device": "cpu"})}, "saf stores outputs in host memory"),
        ({"method": MethodConfig("esam")}, "esam chooses tensors and rows in Python"),
        ({}, None),
    ],
)
def test_why_a_run_is_plain(changes, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**34, 2**34))
    one = dataclasses.replace(Config(device="cuda"), **changes)
    why = state.why_plain(one, load_data(DataConfig()), state.device_of(one))
    assert why is None if reason is None else reason in why


def test_images_that_do_not_fit_stay_where_they_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**10, 2**34))
    why = state.why_plain(Config(), load_data(DataConfig()), torch.device("cuda"))
    assert "0.0 GiB, do not fit" in why


def test_runs_that_take_turns_end_as_they_would_alone(tmp_path, monkeypatch):
    def with_dropout(name, **sizes):
        return torch.nn.Sequential(torch.nn.Dropout(0.2), build_model(name, **sizes))

    monkeypatch.setattr(state, "build_model", with_dropout)  # whose numbers are all runs' own
    runs = [(config("saf", seed=seed), tmp_path / f"seed{seed}") for seed in range(3)]
    ended = []
    fit_together(runs, 2, lambda folder, run: ended.append((folder, run.accuracy)))
    assert sorted(folder for folder, _ in ended) == [folder for _, folder in runs]
    for one, folder in runs:
        alone = fit(one, tmp_path / "alone" / folder.name)
        assert (folder, alone.accuracy) in ended
        mine, other = (load_checkpoint(run)[0] for run in (folder, alone.folder))
        assert all(torch.equal(mine[name], other[name]) for name in other)


def test_runs_that_take_turns_are_checked_before_the_first_begins(tmp_path):
    late = dataclasses.replace(
        config("saf"), method=MethodConfig("saf", {"lag": 1, "start_epoch": 99})
    )
    runs = [(config(), tmp_path / "first"), (late, tmp_path / "second")]
    with pytest.raises(ValueError, match="starts in epoch 99"):
        fit_together(runs, 1, lambda *_: None)
    with pytest.raises(ValueError, match="at least 1 run at once, got 0"):
        fit_together(runs[:1], 0, lambda *_: None)
    assert not list(tmp_path.iterdir())


def test_runs_that_take_turns_are_saved_when_another_fails(tmp_path):
    wrong = {**config("saf").method.settings, "weight": -1.0}
    bad = dataclasses.replace(config("saf"), method=MethodConfig("saf", wrong))
    runs = [(one, tmp_path / name) for one, name in [(config(), "a"), (bad, "b"), (config(), "c")]]
    with pytest.raises(ValueError, match="weight must be"):
        fit_together(runs, 2, lambda *_: None)
    assert [folder.name for folder in tmp_path.iterdir()] == ["a"]
    assert load_checkpoint(tmp_path / "a") is not None


@pytest.mark.parametrize("failing", ["seed0", "seed1"])
def test_a_failure_is_told_although_the_runs_were_being_stopped(failing, tmp_path, monkeypatch):
    def save(run, *rest):
        if run.name == failing:
            raise OSError("no space left")
        return saved(run, *rest)

    saved, asked = state.save_checkpoint, iter([False] * 60 + [True] * 1000).__next__
    monkeypatch.setattr(state, "save_checkpoint", save)
    monkeypatch.setattr(together, "stopping", lambda: contextlib.nullcontext(asked))
    late = config(epochs=9, checkpoint_every=9)
    runs = [(dataclasses.replace(late, seed=i), tmp_path / f"seed{i}") for i in range(2)]
    with pytest.raises(OSError, match="no space left"):
        fit_together(runs, 2, lambda *_: None)


def test_runs_that_take_turns_are_all_saved_when_stopped(tmp_path, monkeypatch):
    runs = [(config(seed=seed), tmp_path / f"seed{seed}") for seed in range(3)]
    monkeypatch.setattr(together, "stopping", lambda: contextlib.nullcontext(asked))
    asked = iter([False] * 40 + [True] * 1000).__next__
    with pytest.raises(Interrupted):
        fit_together(runs, 2, lambda *_: None)
    begun = [folder for _, folder in runs if folder.exists()]
    assert len(begun) == 2
    assert all(load_checkpoint(folder) is not None for folder in begun)
    monkeypatch.undo()
    monkeypatch.setattr(together, "stopping", lambda: contextlib.nullcontext(lambda: True))
    with pytest.raises(Interrupted):  # before anything began
        fit_together(runs, 2, lambda *_: None)
    monkeypatch.undo()
    fit_together(runs, 2, lambda *_: None)
    fit(runs[0][0], tmp_path / "alone")
    same_figures(runs[0][1], tmp_path / "alone", rel=0)
