"""SAF and MESA to read and to copy: the same losses, without the care for speed and resuming.

A test holds them to `saltflat.SAF` and `saltflat.MESA` over 200 steps. They run on one process, and
keep all outputs in float32.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax


def kl(now: Tensor, past: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(past / T) || softmax(now / T)) of each row."""
    log_q, log_p = log_softmax(now / temperature, -1), log_softmax(past / temperature, -1)
    return kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) * temperature**2


class ReferenceSAF:
    """loss = cross_entropy(logits, y) + saf(logits, index)."""

    def __init__(
        self,
        num_samples: int,
        num_classes: int,
        *,
        weight: float = 0.3,
        temperature: float = 5.0,
        lag: int = 3,
        start_epoch: int = 5,
    ) -> None:
        self.weight, self.temperature = weight, temperature
        self.lag, self.start_epoch = lag, start_epoch
        self.outputs = torch.zeros(lag + 1, num_samples, num_classes)
        self.written = torch.full((lag + 1, num_samples), -lag - 1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, logits: Tensor, index: Tensor) -> Tensor:
        old, new = (self.epoch - self.lag) % (self.lag + 1), self.epoch % (self.lag + 1)
        past = self.outputs[old, index]
        valid = self.written[old, index] == self.epoch - self.lag
        loss = (kl(logits, past, self.temperature) * valid).mean()
        self.outputs[new, index] = logits.detach()
        self.written[new, index] = self.epoch
        return self.weight * loss * (self.epoch >= self.start_epoch)


class ReferenceMESA:
    """loss = cross_entropy(logits, y) + mesa(logits, x); after the step, mesa.update(model)."""

    def __init__(
        self,
        model: nn.Module,
        *,
        weight: float = 0.8,
        temperature: float = 5.0,
        decay: float = 0.9995,
        start_epoch: int = 5,
    ) -> None:
        self.weight, self.temperature = weight, temperature
        self.decay, self.start_epoch = decay, start_epoch
        self.teacher = copy.deepcopy(model).eval().requires_grad_(False)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, logits: Tensor, x: Tensor) -> Tensor:
        loss = kl(logits, self.teacher(x), self.temperature).mean()
        return self.weight * loss * (self.epoch >= self.start_epoch)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        teacher, state = self.teacher.state_dict(), model.state_dict()
        for name, tensor in teacher.items():
            if tensor.is_floating_point():
                tensor.lerp_(state[name], 1 - self.decay)
            else:
                tensor.copy_(state[name])
