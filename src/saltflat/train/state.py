"""All that changes in a run, and how it is built, saved and loaded."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from saltflat.core.cuda_graph import random_state, set_random_state
from saltflat.core.distributed import take_first_ranks
from saltflat.train.augment import RANK, stream
from saltflat.train.checkpoint import load_checkpoint, save_checkpoint
from saltflat.train.config import Config, require
from saltflat.train.data import Data
from saltflat.train.methods import Method, Setting, Training, check_method
from saltflat.train.models import build_model
from saltflat.train.optim import build_optimizer, build_schedule
from saltflat.train.parallel import check_parallel, wrap_parallel
from saltflat.train.ranks import ALONE, Ranks, device_of

_PROGRESS = ("epoch", "step", "best", "seconds")
_OWN = ("lr", "fused", "foreach", "capturable")
"""What an optimizer's groups have by where the run takes place, not by what it has come to."""


@dataclass
class State:
    """All that changes in a run."""

    model: nn.Module
    network: nn.Module
    """The model as training calls it: several processes average gradients there."""
    training: Training
    schedule: torch.optim.lr_scheduler.LRScheduler
    sums: Tensor
    """Over this epoch's images: vanilla loss, extra loss, right answers. Left on the device."""
    batch_size: int
    plain_because: str | None
    """Why its steps cannot be recorded; None: they can."""
    ranks: Ranks
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
        """The epoch's means so far, over this process's rows; this waits for the device."""
        rows = self.step * self.batch_size // self.ranks.size
        loss, extra, right = (self.sums / rows).tolist()
        return {"loss": loss, "extra_loss": extra, "train_accuracy": 100 * right}

    def settle(self) -> None:
        """Have one model: rank 0's BatchNorm statistics on every rank, as it alone is evaluated.

        A training pass reads none of them, so that they may differ until then.
        """
        if self.ranks.several:
            take_first_ranks(list(self.model.buffers()), None)

    def save(self, run: Path, steps_per_epoch: int, data: Data) -> Path:
        """Write a checkpoint; all processes call this."""
        self.settle()
        self.training.sync()
        own = {"random": random_state(self.model.parameters()), "sums": self.sums.cpu()}
        everyones = self.ranks.gathered(own)
        state = {
            "training": self.training.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": [theirs["random"] for theirs in everyones],
            "data": fingerprint(data),
            "sums": torch.stack([cast(Tensor, theirs["sums"]) for theirs in everyones]),
            "progress": {name: getattr(self, name) for name in _PROGRESS},
        }
        done = self.epoch * steps_per_epoch + self.step
        return save_checkpoint(run, done, self.model.state_dict(), state, self.ranks)

    def load(self, run: Path, data: Data) -> None:
        """Go on from a run's newest checkpoint, if it has one.

        Raises:
            ValueError: If it was made with other data.
        """
        loaded = load_checkpoint(run, self.ranks)
        if loaded is None:
            return
        weights, state = loaded
        check_data(run, state, data)
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
        for name, value in state["progress"].items():
            setattr(self, name, value)
        rank, size = self.ranks.rank, self.ranks.size
        sums, random = state["sums"], state["random"]
        self.sums.copy_(sums[rank] if len(sums) == size else sums.sum(0) / size)
        if rank < len(random):
            set_random_state(random[rank])


def fresh_model(config: Config, data: Data, device: torch.device) -> nn.Module:
    """The model of a config, with random weights."""
    model = build_model(
        config.model,
        num_classes=data.num_classes,
        in_channels=data.in_channels,
        image_size=data.image_size,
        initialization=config.initialization,
    ).to(device)
    return model.to(memory_format=torch.channels_last) if config.channels_last else model


def check_config(config: Config) -> Method:
    """The method of a config, if there is such a method with such settings, and all begins in time.

    Raises:
        ValueError: If not: the method, or the learning rate's warm-up, would outlast the run.
    """
    method = check_method(config.method)
    settings = {**method.settings(), **config.method.settings}
    limits = {
        "lag": "compares with {} epochs ago",
        "start_epoch": "starts in epoch {}",
        "freeze_epoch": "freezes its teacher in epoch {}",
    }
    for name, meaning in limits.items():
        value = settings.get(name)  # of whatever kind: the method will say
        if isinstance(value, int) and value >= config.epochs:
            raise ValueError(
                f"{config.method.name} {meaning.format(value)}, and the run has "
                f"{config.epochs}, counted from 0: set method.settings.{name}"
            )
    if config.optimizer.warmup_epochs >= config.epochs:
        raise ValueError(
            f"a warm-up of {config.optimizer.warmup_epochs} epochs leaves nothing of "
            f"{config.epochs}"
        )
    return method


def build(
    config: Config, data: Data, steps_per_epoch: int, ranks: Ranks = ALONE
) -> tuple[State, torch.device]:
    """Model, optimizer, schedule and method, all checked against each other."""
    method = check_config(config)
    device = device_of(config)
    model = fresh_model(config, data, device)
    if config.sync_batchnorm and ranks.several:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    reason = why_plain(config, data, device, ranks)
    optimizer = build_optimizer(model, config.optimizer, recorded=reason is None)
    setting = Setting(model, optimizer, len(data.train), data.num_classes, config.seed)
    training = method.build(setting, **config.method.settings)
    parts, clipped = config.optimizer.accumulate > 1, config.optimizer.clip_norm is not None
    if training.per_row and (parts or clipped):
        raise ValueError(
            f"{config.method.name} chooses rows of the batch: it takes neither accumulate nor "
            "clip_norm"
        )
    check_parallel(config, training, device, ranks)
    network = wrap_parallel(model, device, ranks)
    if ranks.several:  # the same weights on all, but not the same dropout
        torch.manual_seed(int(stream(config.seed, 0, RANK, ranks.rank).integers(2**63)))
    schedule = build_schedule(training.optimizer, config.optimizer, config.epochs, steps_per_epoch)
    sums = torch.zeros(3, device=device)
    size = config.data.batch_size
    state = State(model, network, training, schedule, sums, size, reason, ranks)
    return state, device


def why_plain(config: Config, data: Data, device: torch.device, ranks: Ranks = ALONE) -> str | None:
    """Why a run's data cannot live on the GPU and its steps be recorded there; None: they can."""
    images = data.train.images
    if not config.fast:
        return "the config says so"
    if device.type != "cuda":
        return "there is no GPU"
    if ranks.several:
        return "several processes wait for each other within a step"
    if not isinstance(images, Tensor):
        return "the images are decoded one by one"
    for name in ("mixup", "cutmix"):
        if getattr(config.data, name):
            return f"{name} is chosen for each batch on the CPU"
    if config.data.augment == "inception":
        return "the inception augmentation resizes images one by one"
    if config.method.name == "esam":
        return "esam chooses tensors and rows in Python"
    if images.nbytes > torch.cuda.mem_get_info(device)[0] // 2:
        return f"the images, {images.nbytes / 2**30:.1f} GiB, do not fit beside the model"
    if str(config.method.settings.get("device")).startswith("cpu"):
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
