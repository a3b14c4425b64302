import io
import json
import os
import pty
import sys
import threading
from types import ModuleType

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from saltflat.train.log import (
    METRICS,
    TensorBoard,
    Wandb,
    build_trackers,
    progress,
    read_metrics,
    write_metrics,
)

ROWS = [{"epoch": 0, "loss": 0.1 + 0.2, "accuracy": 50.0}, {"epoch": 1, "loss": 1e-30}]


def test_metrics_come_back_and_are_a_line_of_json_each(tmp_path):
    assert read_metrics(tmp_path) == []
    write_metrics(tmp_path, ROWS)
    assert read_metrics(tmp_path) == ROWS
    assert [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()] == ROWS
    write_metrics(tmp_path, ROWS[:1])
    assert read_metrics(tmp_path) == ROWS[:1]
    write_metrics(tmp_path, [])
    assert read_metrics(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


def test_metrics_that_cannot_be_written_leave_the_old_ones(tmp_path):
    write_metrics(tmp_path, ROWS)
    with pytest.raises(TypeError):
        write_metrics(tmp_path, [*ROWS, {"loss": object()}])
    assert read_metrics(tmp_path) == ROWS


def test_tensorboard_reads_what_was_written(tmp_path):
    (tracker,) = build_trackers(("tensorboard",), tmp_path, {})
    tracker.write(0, {"loss": 2.5, "accuracy": 10.0})
    tracker.write(1, {"loss": 1.25, "accuracy": 20.0})
    # Not closed: what an epoch wrote must be there without it.
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["accuracy", "loss"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 2.5), (1, 1.25)]
    assert [(e.step, e.value) for e in events.Scalars("accuracy")] == [(0, 10.0), (1, 20.0)]
    tracker._writer.close()


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_wandb_and_trackio_get_init_and_log(package, tmp_path, monkeypatch):
    calls = []
    fake = ModuleType(package)
    fake.init = lambda **kwargs: calls.append(("init", kwargs))
    fake.log = lambda figures: calls.append(("log", figures))
    monkeypatch.setitem(sys.modules, package, fake)
    (tracker,) = build_trackers((package,), tmp_path / "run7", {"epochs": 2})
    tracker.write(1, {"loss": 0.5})
    assert calls == [
        ("init", {"project": "saltflat", "name": "run7", "config": {"epochs": 2}}),
        ("log", {"epoch": 1, "loss": 0.5}),
    ]


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_missing_tracker_names_what_to_install(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"{package} needs: pip install {package}$"):
        Wandb(package, tmp_path, {})


def test_a_missing_tensorboard_names_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install tensorboard$"):
        TensorBoard(tmp_path)
    assert not any(tmp_path.iterdir())


def test_off_a_terminal_the_bar_is_silent_and_asks_for_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress(epochs=2, steps=20, done=0) as bar:
        for step in range(40):
            bar.step(step // 20, 8, lambda: pytest.fail("waited for the device"))
    assert sys.stderr.getvalue() == ""


def test_on_a_terminal_the_bar_shows_epoch_figures_and_rate(monkeypatch):
    ours, theirs = pty.openpty()
    shown = []

    def drain():
        try:
            while block := os.read(ours, 4096):
                shown.append(block)
        except OSError:  # how Linux says that the other side is closed
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    asked = []

    def figures():
        asked.append(1)
        return {"loss": 1.23456}

    for name, value in {"TERM": "xterm", "COLUMNS": "200", "LINES": "20"}.items():
        monkeypatch.setenv(name, value)
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress(epochs=3, steps=10, done=10) as bar:
            for _ in range(10):
                bar.step(1, 8, figures)
    reader.join()
    os.close(ours)
    text = b"".join(shown).decode()
    assert "epoch 2/3  loss 1.235  " in text
    assert "images/s" in text
    assert len(asked) == 1  # once in ten steps: it waits for the device
