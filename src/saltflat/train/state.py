"""All that changes in a run, and how it is built, saved and loaded."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.sam._random import random_state, set_random_state
from saltflat.train.checkpoint import save_checkpoint
from saltflat.train.config import Config
from saltflat.train.data import Data
from saltflat.train.methods import Setting, Training, check_method
from saltflat.train.models import build_model
from saltflat.train.optim import build_optimizer, build_schedule

_PROGRESS = ("epoch", "step", "best", "seconds")


@dataclass
class State:
    """All that changes in a run."""

    model: nn.Module
    training: Training
    schedule: torch.optim.lr_scheduler.LRScheduler
    sums: Tensor
    """Over this epoch's images: vanilla loss, extra loss, right answers. Left on the device."""
    batch_size: int
    epoch: int = 0
    step: int = 0
    """Steps done in the epoch."""
    best: float = 0.0
    seconds: float = 0.0

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
            "data": fingerprint(data),
            "sums": self.sums,
            "progress": {name: getattr(self, name) for name in _PROGRESS},
        }
        done = self.epoch * steps_per_epoch + self.step
        return save_checkpoint(run, done, self.model.state_dict(), state)

    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.model.load_state_dict(weights)
        self.training.load_state_dict(state["training"])
        self.schedule.load_state_dict(state["schedule"])
        self.sums.copy_(state["sums"])
        for name, value in state["progress"].items():
            setattr(self, name, value)
        set_random_state(state["random"])


def device_of(config: Config) -> torch.device:
    """Where a run takes place: a GPU if there is one, unless the config says otherwise."""
    return torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def build(config: Config, data: Data, steps_per_epoch: int) -> tuple[State, torch.device]:
    """Model, optimizer, schedule and method, all checked against each other."""
    method = check_method(config.method)
    device = device_of(config)
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
    sums = torch.zeros(3, device=device)
    return State(model, training, schedule, sums, config.data.batch_size), device


def fingerprint(data: Data) -> int:
    """A sum of the labels and some images, by which changed data are noticed."""
    value = zlib.crc32(data.train.labels.numpy().tobytes())
    for index in range(min(len(data.train), 16)):
        value = zlib.crc32(data.train[index][0].numpy().tobytes(), value)
    return value
