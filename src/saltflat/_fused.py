"""The trajectory loss and its memory in two GPU kernels, where PyTorch would launch fifty.

`compare` has a program for each row: it fetches the row's reference, decodes it, and leaves the
row's loss and its gradient, both before the mean. `finish` knows how many rows are valid: it
scales the gradients, sums the loss, and encodes the outputs into the memory. Two launches, because
no row may be written before all are read: a sample may be in a batch twice.

The numbers are those of `trajectory_loss`, `OutputMemory` and the codecs, to rounding; what is
stored is the same to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from saltflat._kernels import compare, finish
from saltflat._sources import Given, Ring, Staged

MOST_CLASSES = 8192
"""A program holds its row in registers; longer rows are PyTorch's."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK = 1024


def serves(logits: Tensor) -> bool:
    """Whether these kernels can take such logits."""
    return (
        (logits.is_cuda or triton.knobs.runtime.interpret)
        and logits.dtype in _DTYPES
        and 0 < logits.shape[-1] <= MOST_CLASSES
        and len(logits) > 0
    )


def weighted_loss(
    logits: Tensor,
    source: Ring | Staged | Given,
    nonfinite: Tensor,
    *,
    weight: float,
    temperature: float,
    tau_squared: bool,
    started: bool = True,
) -> tuple[Tensor, Tensor]:
    """weight * trajectory_loss of (batch, classes) logits; records them where the source does.

    Args:
        logits: The outputs now.
        source: Where the references are.
        nonfinite: A counter, to which the rows with NaN or infinity are added.
        weight: Times the loss.
        temperature: As of `trajectory_loss`.
        tau_squared: Likewise.
        started: Whether to compare at all, or only to record.

    Returns:
        The loss, and which rows are finite.
    """
    scale = weight * (temperature**2 if tau_squared else 1.0)
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    loss, _, _, finite = _Fused.apply(logits, source, nonfinite, temperature, scale, started)
    return loss, finite


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        logits: Tensor,
        source: Ring | Staged | Given,
        nonfinite: Tensor,
        temperature: float,
        scale: float,
        started: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        batch, classes = logits.shape
        device = logits.device
        numbers = torch.empty(batch + 1, dtype=torch.float32, device=device)
        pulls = torch.empty((batch, classes) if started else (0,), device=device)
        valid, finite = torch.empty((2, batch), dtype=torch.bool, device=device).unbind()
        unused = nonfinite  # where a kernel does not look
        if source.mode == "ring":
            table, stamps, index, clock = source.table, source.stamps, source.index, source.clock
            into, samples, storage = table, source.num_samples, source.storage
        elif source.mode == "staged":
            table, stamps, index, clock = source.stored, source.valid, unused, unused
            into, samples, storage = source.outgoing, 0, source.storage
        else:
            table, stamps, index, clock = source.reference, unused, unused, unused
            into, samples, storage = unused, 0, "float32"
        block = triton.next_power_of_2(classes)
        modes = {
            "BLOCK": block,
            "STORAGE": storage,
            "MODE": source.mode,
            "STARTED": started,
            "num_warps": 8 if block > 2048 else 4,
        }
        stride = logits.stride(0)
        compare[(batch,)](
            logits, table, stamps, index, clock, numbers, pulls, valid, finite,
            stride, classes, samples, temperature, **modes,
        )  # fmt: skip
        finish[(batch,)](
            logits, into, stamps, index, clock, numbers, pulls, valid, finite, nonfinite,
            stride, batch, classes, samples, scale, scale / temperature, CHUNK=_CHUNK, **modes,
        )  # fmt: skip
        return numbers[batch], pulls, valid, finite

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, _, _, temperature, scale, started = inputs
        _, pulls, valid, finite = output
        ctx.mark_non_differentiable(pulls, valid, finite)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, pulls, valid)
        ctx.temperature, ctx.scale, ctx.started = temperature, scale, started

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        logits, pulls, valid = ctx.saved_tensors
        if grad is None or not ctx.started:
            return (None,) * 6
        if not torch.is_grad_enabled():
            return torch.mul(pulls, grad, out=torch.empty_like(logits)), *(None,) * 5
        # Second derivatives are wanted: add what is 0, with the derivative that pulls have.
        q = torch.softmax(logits.float() / ctx.temperature, -1)
        change = torch.where(valid[:, None], q - q.detach(), 0.0)
        share = ctx.scale / ctx.temperature / valid.sum().clamp(min=1)
        return ((pulls + share * change) * grad).to(logits.dtype), *(None,) * 5
