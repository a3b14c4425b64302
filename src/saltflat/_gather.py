"""Rows of a table with stamps."""

from __future__ import annotations

import torch
from torch import Tensor


def gather(
    table: Tensor, stamps: Tensor, rows: Tensor, wanted: Tensor, pinned: bool
) -> tuple[Tensor, Tensor]:
    """Rows of the table, and whether each carries the stamp that is wanted."""
    found = _opaque_gather if torch.compiler.is_compiling() else _gather
    return found(table, stamps, rows, wanted, pinned)


def _gather(
    table: Tensor, stamps: Tensor, rows: Tensor, wanted: Tensor, pinned: bool
) -> tuple[Tensor, Tensor]:
    valid = stamps.index_select(0, rows) == wanted
    if not pinned:
        return table.index_select(0, rows), valid
    stored = torch.empty((len(rows), table.shape[1]), dtype=table.dtype, pin_memory=True)
    return torch.index_select(table, 0, rows, out=stored), valid.pin_memory()


# A compiler takes a gather for cheap and may do it again in the backward pass, when the rows have
# been overwritten. An operator that it cannot look into is done once.
_opaque_gather = torch.library.custom_op("saltflat::gather", _gather, mutates_args=())


@_opaque_gather.register_fake
def _(
    table: Tensor, stamps: Tensor, rows: Tensor, wanted: Tensor, pinned: bool
) -> tuple[Tensor, Tensor]:
    return table.new_empty((len(rows), table.shape[1])), rows.new_empty(len(rows), dtype=torch.bool)
