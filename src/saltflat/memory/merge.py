"""Several processes: each writes its own rows, and all become whole once an epoch.

References are read in later epochs than they are written, so no step needs a message. When an epoch
ends, all-reduces give every process the rows that any process wrote: the owners by MIN, then the
rows of each table as bytes by SUM, which is exact because each row has one owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from saltflat.core.distributed import message_device, world

NOBODY = torch.iinfo(torch.int32).max
CHUNK = 2**26
"""Bytes of one message."""


def all_reduce(
    tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> None:
    """All-reduce in place, from any device through the group's.

    Raises:
        RuntimeError: If a process does not answer.
    """
    message = tensor.to(message_device(tensor, group))
    try:
        dist.all_reduce(message, op, group)
    except RuntimeError as error:
        raise RuntimeError(
            "a process did not come to merge its rows: every process must call set_epoch and sync "
            f"equally often ({error})"
        ) from error
    if message is not tensor:
        tensor.copy_(message)


def require_agreement(state: str, group: dist.ProcessGroup | None) -> None:
    """Check that all processes are in the same epoch, with the same settings.

    Raises:
        RuntimeError: If they are not.
    """
    own = torch.tensor(crc32(state.encode()), device="cpu")
    extremes = torch.stack([own, -own])
    all_reduce(extremes, dist.ReduceOp.MIN, group)
    if not torch.equal(extremes[0], -extremes[1]):
        raise RuntimeError(
            "the processes differ in their epoch or settings: on all of them load the same state "
            f"and call set_epoch with the same numbers. Here: {state}"
        )


@torch.no_grad()
def merge_rows(
    tables: Iterable[Tensor], claims: Tensor, written: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """Give every process the rows that any process wrote.

    Args:
        tables: Tensors with a row for each sample, changed in place.
        claims: For each sample call * processes + rank of its first write here, 0 for a row that
            all processes have. The smallest claim wins: the first call, then the lowest rank.
        written: Whether this process has a row for the sample.
        group: The processes.

    Returns:
        Whether any process had a row for the sample.
    """
    rank, size = world(group)
    owners = torch.where(written, claims, NOBODY)
    all_reduce(owners, dist.ReduceOp.MIN, group)
    mine = written & (claims == owners) & (owners % size == rank)
    known = owners < NOBODY
    for table in tables:
        rows = max(CHUNK // max(table[:1].nbytes, 1), 1)
        parts = zip(table.split(rows), mine.split(rows), known.split(rows), strict=True)
        for part, own, any_rank in parts:
            shape = (-1,) + (1,) * (part.dim() - 1)
            message = torch.where(own.view(shape), part, torch.zeros_like(part))
            all_reduce(message.view(torch.uint8), dist.ReduceOp.SUM, group)
            part.copy_(torch.where(any_rank.view(shape), message, part))
    return known
