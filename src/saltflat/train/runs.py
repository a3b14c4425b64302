"""A recorded run opened again: its config, its data, and its model with the last weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.train.checkpoint import list_checkpoints, load_checkpoint
from saltflat.train.config import Config, require
from saltflat.train.data import Data, load_data
from saltflat.train.evaluate import training_batches
from saltflat.train.folder import read_config
from saltflat.train.ranks import device_of
from saltflat.train.state import check_data, fresh_model


@dataclass(frozen=True)
class Opened:
    """A run as its newest checkpoint has it. Models are in evaluation mode."""

    folder: Path
    config: Config
    data: Data
    device: torch.device
    model: nn.Module
    teacher: nn.Module | None
    """The moving average of the weights, where the method keeps one."""
    epochs: int
    """Done when the checkpoint was written."""

    def batches(self, images: int = 1024, *, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Training images as a test would see them, on the device; see `training_batches`."""
        return training_batches(self.data, images, self.device, seed=seed)


def open_run(folder: Path | str, *, device: str | None = None) -> Opened:
    """Open a run that `fit` has recorded, complete or not. Torch's random state stays as it is.

    Args:
        folder: The run's folder.
        device: Instead of the one that it was trained on.

    Raises:
        ValueError: If there is no run, it has no checkpoint yet, its data have changed, or the
            device is not here.
        CheckpointError: If the checkpoint is damaged.
    """
    run = Path(folder)
    config = check_run(run)
    where = device_of(config) if device is None else torch.device(device)
    require(
        where.type != "cuda" or torch.cuda.is_available(),
        f"{run} was trained on {where}, and there is no GPU here: say device cpu",
    )
    checkpoint = load_checkpoint(run)
    assert checkpoint is not None  # or it would not have passed
    weights, state = checkpoint
    data = load_data(config.data)
    check_data(run, state, data)

    def loaded(tensors: dict[str, Tensor]) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            model = fresh_model(config, data, where)
        model.load_state_dict(tensors)
        return model.eval()

    average = _teacher_weights(state["training"])
    return Opened(
        folder=run,
        config=config,
        data=data,
        device=where,
        model=loaded(weights),
        teacher=loaded(average) if average else None,
        epochs=state["progress"]["epoch"],
    )


def check_run(run: Path) -> Config:
    """The config of a run that can be opened, by a look at its folder alone.

    Raises:
        ValueError: If there is no run, or it has no checkpoint yet.
    """
    config = read_config(run)
    require(
        bool(list_checkpoints(run)),
        f"{run} has no checkpoint yet: train it for an epoch at least, with "
        f"saltflat train --resume {run}",
    )
    return config


def _teacher_weights(training: dict[str, Any]) -> dict[str, Tensor]:
    """Those of an `EMATeacher`, alone or within MESA, by their names in the model."""
    names = {name: name.removeprefix("teacher.") for name in training.get("method", {})}
    return {
        own.removeprefix("module."): training["method"][name]
        for name, own in names.items()
        if own.startswith("module.")
    }
