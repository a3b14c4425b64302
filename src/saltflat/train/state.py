"""All that changes in a run, and how it is built, saved and loaded."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.sam._random import random_state, set_random_state
from saltflat.train.checkpoint import save_checkpoint
from saltflat.train.config import Config, require
from saltflat.train.data import Data
from saltflat.train.methods import Setting, Training, check_method
from saltflat.train.models import build_model
from saltflat.train.optim import build_optimizer, build_schedule

_PROGRESS = ("epoch", "step", "best", "seconds")
_OWN = ("lr", "fused", "foreach", "capturable")
"""What an optimizer's groups have by where the run takes place, not by what it has come to."""


@dataclass
class State:
    """All that changes in a run."""

    model: nn.Module
    training: Training
    schedule: torch.optim.lr_scheduler.LRScheduler
    sums: Tensor
    """Over this epoch's images: vanilla loss, extra loss, right answers. Left on the device."""
    batch_size: int
    plain_because: str | None
    """Why its steps cannot be recorded; None: they can."""
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
        groups = self.training.optimizer.param_groups
        own = [{name: group[name] for name in _OWN if name in group} for group in groups]
        self.training.load_state_dict(state["training"])
        for group, before in zip(self.training.optimizer.param_groups, own, strict=True):
            if isinstance(before["lr"], Tensor):
                before["lr"].fill_(float(group["lr"]))  # in place, where a replay looks for it
            else:
                before["lr"] = float(group["lr"])
            group.update(before)
            if group.get("fused"):  # else torch has left the count of steps where it was saved
                for parameter in group["params"]:
                    steps = self.training.optimizer.state.get(parameter, {})
                    if isinstance(steps.get("step"), Tensor):
                        steps["step"] = steps["step"].to(parameter.device)
        self.schedule.load_state_dict(state["schedule"])
        self.sums.copy_(state["sums"])
        for name, value in state["progress"].items():
            setattr(self, name, value)
        set_random_state(state["random"])


def device_of(config: Config) -> torch.device:
    """Where a run takes place: a GPU if there is one, unless the config says otherwise."""
    return torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def fresh_model(config: Config, data: Data, device: torch.device) -> nn.Module:
    """The model of a config, with random weights."""
    model = build_model(
        config.model,
        num_classes=data.num_classes,
        in_channels=data.in_channels,
        image_size=data.image_size,
    ).to(device)
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def build(config: Config, data: Data, steps_per_epoch: int) -> tuple[State, torch.device]:
    """Model, optimizer, schedule and method, all checked against each other."""
    require(
        int(os.environ.get("WORLD_SIZE", "1")) == 1,
        "the runner trains in one process for now; for several, see docs/guides/distributed.md",
    )
    method = check_method(config.method)
    device = device_of(config)
    model = fresh_model(config, data, device)
    reason = why_plain(config, data, device)
    optimizer = build_optimizer(model, config.optimizer, recorded=reason is None)
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
    return State(model, training, schedule, sums, config.data.batch_size, reason), device


def why_plain(config: Config, data: Data, device: torch.device) -> str | None:
    """Why a run's data cannot live on the GPU and its steps be recorded there; None: they can."""
    images = data.train.images
    if not config.fast:
        return "the config says so"
    if device.type != "cuda":
        return "there is no GPU"
    if not isinstance(images, Tensor):
        return "the images are decoded one by one"
    for name in ("mixup", "cutmix"):
        if getattr(config.data, name):
            return f"{name} is chosen for each batch on the CPU"
    if config.data.augment == "inception":
        return "the inception augmentation resizes images one by one"
    if images.nbytes > torch.cuda.mem_get_info(device)[0] // 2:
        return f"the images, {images.nbytes / 2**30:.1f} GiB, do not fit beside the model"
    store = {name: config.method.settings.get(name) for name in ("device", "path")}
    if store["path"] is not None or str(store["device"]).startswith("cpu"):
        return f"{config.method.name} stores outputs in host memory"
    return None


def check_data(run: Path, state: dict[str, Any], data: Data) -> None:
    """See to it that a run's saved state belongs to these data."""
    require(
        state["data"] == fingerprint(data),
        f"the data of {run} have changed since it was saved: bring them back, or train anew",
    )


def fingerprint(data: Data) -> int:
    """A sum of the labels and some images, by which changed data are noticed."""
    value = zlib.crc32(data.train.labels.numpy().tobytes())
    for index in range(min(len(data.train), 16)):
        value = zlib.crc32(data.train[index][0].numpy().tobytes(), value)
    return value
