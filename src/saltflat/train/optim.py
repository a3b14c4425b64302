"""The base optimizer, its parameter groups and its schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from saltflat.train.config import OptimizerConfig


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, *, recorded: bool = False
) -> Optimizer:
    """SGD or AdamW; with `decay_vectors` off, what has at most one dimension does not decay.

    For recorded steps the learning rate is a tensor on the device, which a replay reads.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained, "weight_decay": config.weight_decay}]
    if not config.decay_vectors:
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
    lr: Any = torch.tensor(config.lr, device=trained[0].device) if recorded else config.lr
    fused = True if recorded else None
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=config.betas, fused=fused)
    return torch.optim.SGD(
        groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused
    )


def warmup_cosine(step: int, warmup: int, total: int) -> float:
    """The share of the highest learning rate in a step: linear from zero, then cosine to zero.

    Example:
        >>> [round(warmup_cosine(step, 2, 6), 2) for step in range(6)]
        [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


def build_schedule(
    optimizer: Optimizer, config: OptimizerConfig, epochs: int, steps_per_epoch: int
) -> LambdaLR:
    """The schedule of a run, a step at a time."""
    for group in optimizer.param_groups:
        group["initial_lr"] = config.lr  # a number, also where the rate itself is a tensor
    warmup = round(config.warmup_epochs * steps_per_epoch)
    total = epochs * steps_per_epoch
    return LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup, total))
