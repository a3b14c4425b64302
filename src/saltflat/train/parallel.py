"""A model on several processes: a copy on each, whose gradients are averaged."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from saltflat.train.config import Config, require
from saltflat.train.methods import Training
from saltflat.train.ranks import Ranks


def check_parallel(config: Config, training: Training, device: torch.device, ranks: Ranks) -> None:
    """Raise ValueError for what several processes cannot do."""
    if not ranks.several:
        return
    name = config.method.name
    require(
        not training.per_row,
        f"{name} chooses among the rows of a whole batch, of which each of {ranks.size} processes "
        "has a part: train it in one",
    )
    require(
        device.type != "cpu" or not config.sync_batchnorm,
        "sync_batchnorm is for GPUs: torch has none for the CPU",
    )


def wrap_parallel(model: nn.Module, device: torch.device, ranks: Ranks) -> nn.Module:
    """What training calls in the model's place, so that gradients are averaged."""
    if not ranks.several:
        return model
    return DistributedDataParallel(model, [device] if device.type == "cuda" else None)


def synced(network: nn.Module, last: bool) -> AbstractContextManager[None]:
    """The context of a pass over one part of a batch: gradients are averaged after the last."""
    if last or not isinstance(network, DistributedDataParallel):
        return nullcontext()
    return network.no_sync()
