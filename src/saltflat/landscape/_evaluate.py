"""Losses at many places of a line or plane, quickly.

On a GPU, the work for a place is recorded once and replayed for all of them, with coordinates read
and losses written by a counter there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from saltflat.core.cuda_graph import record, tuned
from saltflat.landscape._moving import Loss, Moving
from saltflat.landscape.directions import Directions

CHUNK = 128
"""Places from one look at the device to the next."""
_WARM_UP = 3
"""Times that the work is done before it is recorded: much is compiled, tuned or allocated then."""


class Places:
    """The losses, and right answers, at places of a line or plane.

    Args:
        model: Is copied, and left as it is.
        loss_fn: From outputs and labels to the mean loss of the rows.
        batches: Inputs and labels, on the model's device.
        directions: Where the places lie.
        batchnorm: "eval": running statistics, which move where the directions say so; "batch":
            the statistics of each batch.
        half: Whether to compute in bfloat16, the weights of a place rounded from float32.
        fold: Whether convolutions may take in BatchNorm.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batches: list[tuple[Tensor, Tensor]],
        directions: Directions,
        *,
        batchnorm: Literal["eval", "batch"],
        half: bool,
        fold: bool = True,
    ) -> None:
        self.device = batches[0][0].device
        self._model = Moving(model, loss_fn, directions, batchnorm, half, fold)
        like: dict[str, Any] = {"device": self.device, "dtype": self._model.dtype}
        self._places = torch.zeros(CHUNK, len(directions.axes), **like)
        self._found = torch.zeros(CHUNK, 2, **like)
        batches = _resized(batches, self._model.rows_that_fit(batches))
        self._batches = [(_channels_last(x), y) for x, y in batches]
        self._at = torch.zeros(1, dtype=torch.long, device=self.device)
        """The place to come."""
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._replay: Callable[[], None] | None = None
        self.how = ", ".join(
            [
                "bf16" if half else str(next(model.parameters()).dtype).removeprefix("torch."),
                *(["BatchNorm folded"] if self._model.folds else []),
            ]
        )

    @torch.no_grad()
    def __call__(self, places: Tensor) -> Tensor:
        """For each row of coordinates the loss, and how many answers are right."""
        done = []
        with self._on_stream(), torch.autocast(self.device.type, enabled=False):
            for part in places.split(CHUNK):
                self._places[: len(part)].copy_(part)
                self._at.zero_()
                for _ in part:
                    (self._replay or self._work)()
                done.append(self._found[: len(part)].to("cpu", torch.float64, copy=True))
        return torch.cat(done)

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    @torch.no_grad()
    def record(self) -> None:
        """Record the work for a place, where that is possible; say why where it is not."""
        if not can_record(self.device):
            return
        with self._on_stream(), tuned(), torch.autocast(self.device.type, enabled=False):
            for _ in range(_WARM_UP):
                self._at.zero_()
                self._work()
            try:
                self._replay = record(self._work, None)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                print(f"places are taken one operation at a time: {reason}", file=sys.stderr)
                return
        self.how += ", recorded"

    def _work(self) -> None:
        """The next place."""
        self._model.move(self._places.index_select(0, self._at)[0])
        self._found.index_copy_(0, self._at, self._model.losses(self._batches)[None])
        self._at += 1


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def _resized(batches: list[tuple[Tensor, Tensor]], rows: int | None) -> list[tuple[Tensor, Tensor]]:
    """The same rows in batches of so many."""
    if rows is None:
        return batches
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return list(zip(x.split(rows), y.split(rows), strict=True))


def can_record(device: torch.device) -> bool:
    """Whether work on a device can be recorded."""
    return device.type == "cuda"
