"""Where a batch's references are, for the kernels that read them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor


class Ring(NamedTuple):
    """References in a ring on the device, which the outputs replace."""

    table: Tensor
    stamps: Tensor
    clock: Tensor
    """Of int64: the slot's first row, the epoch now, the epoch wanted, indices out of range."""
    index: Tensor  # type: ignore[assignment]  # a tuple has a method of this name
    num_samples: int
    storage: str
    mode: Literal["ring"] = "ring"


class Staged(NamedTuple):
    """References fetched from elsewhere in their stored form, and room for the outputs in it."""

    stored: Tensor
    valid: Tensor
    outgoing: Tensor
    rows: Tensor
    """Of the table they belong to, wherever that is."""
    storage: str
    mode: Literal["staged"] = "staged"
