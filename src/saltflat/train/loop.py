"""The training loop: one function, read from top to bottom, that knows no method by name.

Everything random depends on the config alone (the order and augmentation of an epoch on its seed
and number), or is in the checkpoint (torch's generators). So a run that was stopped anywhere, and
continued from its last checkpoint, ends with the weights of one that was not.
"""

from __future__ import annotations

import dataclasses
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.sam._random import random_state, set_random_state
from saltflat.train.augment import TrainLoader
from saltflat.train.checkpoint import load_checkpoint, save_checkpoint
from saltflat.train.config import Config
from saltflat.train.data import Data, load_data
from saltflat.train.evaluate import accuracies, training_sharpness
from saltflat.train.files import to_json, write_text
from saltflat.train.folder import CONFIG, RESULT, check_folder
from saltflat.train.log import build_trackers, progress, read_metrics, write_metrics
from saltflat.train.methods import Setting, Training, check_method
from saltflat.train.models import build_model
from saltflat.train.optim import build_optimizer, build_schedule
from saltflat.train.step import build_step


class Interrupted(Exception):  # noqa: N818 - nothing is wrong
    """Ctrl-C: the step was finished and the run saved."""


@dataclass(frozen=True)
class Run:
    """What came of a run."""

    folder: Path
    accuracy: float
    """Of the model on the test set after the last epoch, in percent."""
    best_accuracy: float
    """Of its best epoch, which was chosen on the test set."""
    teacher_accuracy: float | None
    """Of the moving average after the last epoch, where there is one."""
    seconds: float
    """Spent in training steps."""
    images_per_second: float
    extra_bytes: int
    """What the method keeps between steps, beside the base optimizer."""
    sharpness: float
    """SAM's, rho 0.05, on up to 1024 training images as they are."""
    diverged: bool
    """Whether the last epoch's loss is not a number."""


@dataclass
class State:
    """All that changes in a run."""

    model: nn.Module
    training: Training
    schedule: torch.optim.lr_scheduler.LRScheduler
    epoch: int = 0
    step: int = 0
    """Steps done in the epoch."""
    batch_size: int = 1
    best: float = 0.0
    seconds: float = 0.0
    sums: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(3))
    """Over this epoch's images: vanilla loss, extra loss, right answers. Left on the device."""

    def models(self) -> dict[str, nn.Module]:
        """What is evaluated: the model, and its moving average where there is one."""
        found: dict[str, nn.Module] = {"accuracy": self.model}
        if self.training.teacher is not None:
            found["teacher_accuracy"] = self.training.teacher
        return found

    def figures(self) -> dict[str, float]:
        """The epoch's means so far; this waits for the device."""
        loss, extra, right = (self.sums / (self.step * self.batch_size)).tolist()
        return {"loss": loss, "extra_loss": extra, "train_accuracy": 100 * right}

    def save(self, run: Path, steps_per_epoch: int, data: Data) -> Path:
        state = {
            "training": self.training.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": random_state(self.model.parameters()),
            "data": _fingerprint(data),
            "progress": {
                name: getattr(self, name) for name in ("epoch", "step", "best", "seconds", "sums")
            },
        }
        done = self.epoch * steps_per_epoch + self.step
        return save_checkpoint(run, done, self.model.state_dict(), state)

    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.model.load_state_dict(weights)
        self.training.load_state_dict(state["training"])
        self.schedule.load_state_dict(state["schedule"])
        for name, value in state["progress"].items():
            setattr(self, name, value)
        set_random_state(state["random"])


def fit(
    config: Config, folder: Path | str, *, stop: Callable[[int, int], bool] | None = None
) -> Run:
    """Train, or go on with training, what a config says.

    Args:
        config: The run.
        folder: Where the run is or will be: config.json, metrics.jsonl, checkpoints and, when it
            is complete, result.json. A folder that holds a run of this config is continued.
        stop: Asked after every step, with the epoch and the steps done in it, whether to save and
            stop there, as Ctrl-C does.

    Returns:
        The figures of the complete run.

    Raises:
        ValueError: If the config cannot be run, before any training, or the folder holds another.
        Interrupted: If it was stopped; the run is saved.
    """
    run = Path(folder)
    data = load_data(config.data)
    loader = TrainLoader(data, config.data, config.seed)
    torch.manual_seed(config.seed)
    state, device = build(config, data, len(loader))
    check_folder(run, config)
    if (checkpoint := load_checkpoint(run)) is not None:
        if checkpoint[1]["data"] != _fingerprint(data):
            raise ValueError(f"the data of {run} have changed since it was saved")
        state.load(*checkpoint)
    metrics = read_metrics(run)[: state.epoch]
    if len(metrics) < state.epoch:
        raise ValueError(f"{run} has lost figures of its {state.epoch} epochs: start it anew")
    trackers = build_trackers(config.log, run, dataclasses.asdict(config))
    run.mkdir(parents=True, exist_ok=True)
    write_text(run / CONFIG, to_json(dataclasses.asdict(config), indent=1))
    write_metrics(run, metrics)
    step = build_step(config, state.training, state.model, device)

    done = state.epoch * len(loader) + state.step
    with progress(config.epochs, len(loader), done) as bar, _stopping() as interrupted:
        while state.epoch < config.epochs:
            epoch = state.epoch
            state.training.set_epoch(epoch)
            state.model.train()
            begin = time.perf_counter()
            for batch in loader.batches(epoch, skip=state.step):
                figures = step(batch)
                state.schedule.step()
                state.training.after_step(state.model)
                state.sums = state.sums.to(device) + figures
                state.step += 1
                bar.step(epoch, len(batch.labels), state.figures)
                if interrupted() or (stop is not None and stop(epoch, state.step)):
                    state.seconds += time.perf_counter() - begin
                    state.save(run, len(loader), data)
                    raise Interrupted(run)
            means = state.figures()  # which waits for the device, so that the time is all of it
            state.seconds += time.perf_counter() - begin
            figures_of_epoch = {
                **means,
                "lr": state.training.optimizer.param_groups[0]["lr"],
                "seconds": state.seconds,
                **accuracies(config, data, state.models(), device),
            }
            write_metrics(run, [*read_metrics(run), {"epoch": epoch, **figures_of_epoch}])
            for tracker in trackers:
                tracker.write(epoch, figures_of_epoch)
            state.best = max(state.best, figures_of_epoch["accuracy"])
            state.epoch, state.step, state.sums = epoch + 1, 0, torch.zeros(3)
            if state.epoch % config.checkpoint_every == 0 or state.epoch == config.epochs:
                state.save(run, len(loader), data)
    last = read_metrics(run)[-1]
    images = config.epochs * len(loader) * config.data.batch_size
    result = Run(
        folder=run,
        accuracy=last["accuracy"],
        best_accuracy=state.best,
        teacher_accuracy=last.get("teacher_accuracy"),
        seconds=state.seconds,
        images_per_second=images / max(state.seconds, 1e-9),
        extra_bytes=state.training.extra_bytes(),
        sharpness=training_sharpness(data, state.model, device),
        diverged=last["loss"] is None,
    )
    write_text(run / RESULT, to_json(dataclasses.asdict(result)))
    return result


def build(config: Config, data: Data, steps_per_epoch: int) -> tuple[State, torch.device]:
    """Model, optimizer, schedule and method, all checked against each other."""
    method = check_method(config.method)
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = build_model(
        config.model,
        num_classes=data.num_classes,
        in_channels=data.in_channels,
        image_size=data.image_size,
    ).to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model, config.optimizer)
    setting = Setting(model, optimizer, len(data.train), data.num_classes, config.seed)
    settings = {**method.settings(), **config.method.settings}
    limits = {"lag": "compares with {} epochs ago", "start_epoch": "starts in epoch {}"}
    for name, meaning in limits.items():
        if settings.get(name, 0) >= config.epochs:
            raise ValueError(
                f"{config.method.name} {meaning.format(settings[name])}, and the run has "
                f"{config.epochs}, counted from 0: set method.settings.{name}"
            )
    if config.optimizer.warmup_epochs >= config.epochs:
        raise ValueError(
            f"a warm-up of {config.optimizer.warmup_epochs} epochs leaves nothing of "
            f"{config.epochs}"
        )
    training = method.build(setting, **config.method.settings)
    parts, clipped = config.optimizer.accumulate > 1, config.optimizer.clip_norm is not None
    if training.per_row and (parts or clipped):
        raise ValueError(
            f"{config.method.name} chooses rows of the batch: it takes neither accumulate nor "
            "clip_norm"
        )
    schedule = build_schedule(training.optimizer, config.optimizer, config.epochs, steps_per_epoch)
    return State(model, training, schedule, batch_size=config.data.batch_size), device


def _fingerprint(data: Data) -> int:
    """A sum of the labels and some images, by which changed data are noticed."""
    value = zlib.crc32(data.train.labels.numpy().tobytes())
    for index in range(min(len(data.train), 16)):
        value = zlib.crc32(data.train[index][0].numpy().tobytes(), value)
    return value


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """While entered, Ctrl-C is noted rather than raised; a second one is raised."""
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread: nothing to catch there
        yield lambda: False
        return
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)
