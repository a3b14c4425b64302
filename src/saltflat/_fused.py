"""The trajectory loss and its memory in two GPU kernels, where PyTorch would launch fifty.

`compare` has a program for each row: it fetches the row's reference, decodes it, and leaves the
row's loss and its gradient, both before the mean. `finish` knows how many rows are valid: it
scales the gradients, sums the loss, and encodes the outputs into the memory. Two launches, because
no row may be written before all are read: a sample may be in a batch twice.

The numbers are those of `trajectory_loss`, `OutputMemory` and the codecs, to rounding;
what is stored is the same to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from saltflat._kernels import compare, finish
from saltflat._sources import Ring, Staged

MOST_CLASSES = 8192
"""A program holds its row in registers; longer rows are PyTorch's."""
MOST_ROWS = 16384
"""Each program looks through the whole batch for a later row of its sample."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK = 1024


def serves(logits: Tensor) -> bool:
    """Whether these kernels can take such logits."""
    return (
        _is_here(logits.device)
        and logits.dtype in _DTYPES
        and 0 < logits.shape[-1] <= MOST_CLASSES
        and 0 < len(logits) <= MOST_ROWS
    )


def _is_here(device: torch.device) -> bool:
    """Whether kernels are launched on this device; Triton's interpreter has the CPU."""
    if device.type == "cuda":
        return device.index == torch.cuda.current_device()
    return bool(triton.knobs.runtime.interpret)


def _shape(classes: int) -> tuple[int, int]:
    """Numbers and warps of a program that holds a row."""
    block = triton.next_power_of_2(classes)
    return block, 1 if block <= 256 else 4 if block <= 2048 else 8


def weighted_loss(
    logits: Tensor,
    source: Ring | Staged,
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
        The loss, and 1 for each row that is finite, 0 for the others.
    """
    scale = weight * (temperature**2 if tau_squared else 1.0)
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    # The loss of each row, whether it is valid, whether it is finite.
    rows = torch.empty((3, len(logits)), dtype=torch.float32, device=logits.device)
    loss: Tensor = _Fused.apply(logits, source, rows, nonfinite, temperature, scale, started)
    return loss, rows[2]


class _Fused(torch.autograd.Function):
    # Without setup_context: it would cost a third of the call. What it is for, functorch's
    # transforms, does not come here.
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        source: Ring | Staged,
        rows: Tensor,
        nonfinite: Tensor,
        temperature: float,
        scale: float,
        started: bool,
    ) -> Tensor:
        batch, classes = logits.shape
        pulls = rows.new_empty(logits.shape if started else (1,))
        loss = rows.new_empty(())
        samples = 0
        index = clock = logits  # where a kernel does not look
        if source.mode == "ring":
            table, stamps, clock, index, samples, storage, _ = source
            into = table
        else:
            table, stamps, into, _, storage, _ = source
        block, warps = _shape(classes)
        sizes = (logits.stride(0), batch, classes, samples)
        modes = (block, storage, source.mode, started)
        compare[(batch,)](
            logits, table, stamps, index, clock, pulls, rows, *sizes, temperature, *modes,
            num_warps=warps,
        )  # fmt: skip
        finish[(batch,)](
            logits, into, stamps, index, clock, pulls, rows, loss, nonfinite, *sizes,
            scale, scale / temperature, *modes, min(triton.next_power_of_2(batch), _CHUNK),
            num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(logits)
        # What the kernels made is no part of the graph, and is quicker at hand like this.
        ctx.made = pulls, rows
        ctx.settings = temperature, scale, logits.dtype if started else None
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pulls, rows = ctx.made
        temperature, scale, dtype = ctx.settings
        if dtype is None:
            return (None,) * 7
        if not torch.is_grad_enabled():
            out = None if dtype == pulls.dtype else torch.empty_like(pulls, dtype=dtype)
            return torch.mul(pulls, grad, out=out), None, None, None, None, None, None
        # Second derivatives are wanted: add what is 0, with the derivative that pulls have.
        valid = rows[1] != 0
        (logits,) = ctx.saved_tensors
        q = torch.softmax(logits.float() / temperature, -1)
        change = torch.where(valid[:, None], q - q.detach(), 0.0)
        share = scale / temperature / valid.sum().clamp(min=1)
        wanted = ((pulls + share * change) * grad).to(logits.dtype)
        return wanted, None, None, None, None, None, None
