"""A model on several processes: a replica on each, or a part of every weight on each.

Replicas (ddp) average their gradients and so stay the same. Shards (fsdp) are put together, block
after block, when a pass gets there. Either way the model, the optimizer and the method are built as
for one process, and know nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from saltflat.train.config import Config, require
from saltflat.train.methods import Training
from saltflat.train.ranks import Ranks
from saltflat.train.shards import storage


def check_parallel(config: Config, training: Training, device: torch.device, ranks: Ranks) -> None:
    """Raise ValueError for what several processes cannot do, ImportError if torch is too old."""
    if not ranks.several:
        return
    storage()  # now, rather than when the first checkpoint is due
    name = config.method.name
    require(
        not training.per_row,
        f"{name} chooses among the rows of a whole batch, of which each of {ranks.size} processes "
        "has a part: train it in one",
    )
    require(
        getattr(training.term, "exchange", "any") == "any",
        f"{name} with exchange='own' needs samples that stay on one process, and the runner sends "
        "any sample to any: leave it out, or see StickySampler for a loop of your own",
    )
    stored = {key: config.method.settings.get(key) for key in ("device", "path")}
    require(
        device.type == "cpu" or (stored["path"] is None and stored["device"] is None),
        f"{name} cannot exchange outputs between GPUs and host memory: leave out device and path",
    )
    require(
        device.type != "cpu" or not config.sync_batchnorm,
        "sync_batchnorm is for GPUs: torch has none for the CPU",
    )


def spread(
    config: Config, model: nn.Module, training: Training, device: torch.device, ranks: Ranks
) -> nn.Module:
    """What training calls in the model's place; the optimizer steps with what all processes found.

    Must come before the first step, and before anything else takes the parameters.
    """
    if not ranks.several:
        return model
    if config.parallel == "ddp":
        return DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (ranks.size,))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    _shard(model, mesh)
    if training.teacher is not None:
        _shard(training.teacher.module, mesh)
    shards = dict(model.named_parameters())
    for group in training.optimizer.param_groups:
        group["params"] = [shards[names[id(parameter)]] for parameter in group["params"]]
    return model


def is_sharded(module: nn.Module) -> bool:
    """Whether each process has another part of its weights."""
    return hasattr(module, "set_requires_gradient_sync")


def synced(network: Any, last: bool) -> AbstractContextManager[Any]:
    """The context of a pass over one part of a batch: gradients are averaged after the last."""
    if isinstance(network, DistributedDataParallel):
        return nullcontext() if last else network.no_sync()
    if is_sharded(network):
        network.set_requires_gradient_sync(last)
    return nullcontext()


def _shard(module: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    # The root's weights too are parted again after a pass, or a teacher's would stay whole.
    for block in [*_blocks(module), module]:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The largest parts that are made of layers; single layers are too small to be sent alone."""
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from _blocks(child)
        elif any(True for _ in child.children()) and any(True for _ in child.parameters()):
            yield child
