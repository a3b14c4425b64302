"""What a run says: a bar for people, a line of JSON an epoch for everything else."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from saltflat.train.files import to_json, write_text

METRICS = "metrics.jsonl"


class Tracker(Protocol):
    """A place that takes an epoch's figures."""

    def write(self, epoch: int, figures: dict[str, float]) -> None: ...


class TensorBoard:
    """TensorBoard's event files, beside the metrics."""

    def __init__(self, run: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("logging to tensorboard needs: pip install tensorboard") from error
        self._writer = SummaryWriter(str(run / "tensorboard"))

    def write(self, epoch: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, epoch)
        self._writer.flush()


class Wandb:
    """Weights & Biases, or trackio, which has the same interface."""

    def __init__(self, package: str, run: Path, config: dict[str, Any]) -> None:
        import importlib

        try:
            module = importlib.import_module(package)
        except ImportError as error:
            raise ImportError(f"logging to {package} needs: pip install {package}") from error
        self._module = module
        module.init(project="saltflat", name=run.name, config=config)

    def write(self, epoch: int, figures: dict[str, float]) -> None:
        self._module.log({"epoch": epoch, **figures})


def build_trackers(names: tuple[str, ...], run: Path, config: dict[str, Any]) -> list[Tracker]:
    """The trackers of a config."""
    return [
        TensorBoard(run) if name == "tensorboard" else Wandb(name, run, config) for name in names
    ]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """A run's figures, an epoch each."""
    path = run / METRICS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_metrics(run: Path, rows: list[dict[str, Any]]) -> None:
    """Write them anew, as after a resume from an earlier epoch."""
    write_text(run / METRICS, "".join(to_json(row) + "\n" for row in rows))


class Bar:
    """The progress of a run: a bar on a terminal, nothing elsewhere."""

    def __init__(self, epochs: int, steps: int, done: int, shown: bool) -> None:
        self._epochs, self._steps = epochs, steps
        self._begin, self._first, self._done = time.perf_counter(), done, done
        self._progress: Any = None
        if shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._progress.add_task("", total=epochs * steps, completed=done)

    def step(self, epoch: int, batch: int, figures: Callable[[], dict[str, float]]) -> None:
        """Show a step; the figures are only asked for where someone looks."""
        self._done += 1
        last = self._done == self._epochs * self._steps
        if self._progress is None or (self._done % 10 and not last):
            return
        rate = (self._done - self._first) * batch / (time.perf_counter() - self._begin)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in figures().items())
        text = f"epoch {epoch + 1}/{self._epochs}  {shown}  {rate:,.0f} images/s"
        self._progress.update(self._task, completed=self._done, description=text)


@contextmanager
def progress(epochs: int, steps: int, done: int, shown: bool = True) -> Iterator[Bar]:
    """A bar that ends when the run does."""
    bar = Bar(epochs, steps, done, shown)
    if bar._progress is None:
        yield bar
        return
    with bar._progress:
        yield bar
