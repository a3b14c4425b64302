"""A copy of a model whose weights are those of any place of a line or plane, and its losses.

What moves lies in one run of memory, so that a place's weights, origin + a * first axis + b *
second, are made in a pass for each axis. In eval mode, convolutions take in BatchNorm where they
can.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from saltflat.landscape.directions import Directions
from saltflat.teacher import FoldedTwin

Loss = Callable[[Tensor, Tensor], Tensor]
_CPU_ROWS = 128
"""Rows at once on a CPU, whose caches are small."""
_APART = 64
"""Tensors begin at multiples of so many numbers, as kernels like it."""


class Moving:
    """A copy of the model that moves.

    Args:
        model: Is copied, and left as it is.
        loss_fn: From outputs and labels to the mean loss of the rows.
        directions: Where it moves.
        batchnorm: Whose statistics: "eval", running ones; "batch", those of each batch.
        half: Whether to compute in bfloat16.
        fold: Whether convolutions may take in BatchNorm.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        directions: Directions,
        batchnorm: str,
        half: bool,
        fold: bool,
    ) -> None:
        self._loss_fn, self._half = loss_fn, half
        self._model = copy.deepcopy(model).requires_grad_(False).eval()
        own = next(model.parameters()).dtype
        self.dtype = torch.promote_types(own, torch.float32)
        """Of coordinates and losses."""
        self._runs = _in_runs(self._model, directions)
        for module in self._model.modules():
            if batchnorm == "batch" and isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train()
                module.track_running_stats = False
        self._twin: FoldedTwin | None = None
        if fold and batchnorm == "eval":
            with suppress(ValueError):  # nothing to fold, or no way to trace it: the model runs
                self._twin = FoldedTwin(self._model)
        self.folds = self._twin is not None

    def move(self, place: Tensor) -> None:
        """Make the weights of a place."""
        for run in self._runs:
            run.move(place)
        if self._twin is not None:
            self._twin.refresh()

    def losses(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The mean loss of all rows, and how many answers are right where these are classes."""
        total = sum(len(x) for x, _ in batches)
        parts = [self._batch(x, y, len(x) / total) for x, y in batches]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _batch(self, x: Tensor, y: Tensor, share: float) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, self._half, cache_enabled=False):
            outputs = self._model(x) if self._twin is None else self._twin(x)
        outputs = outputs.float() if self._half else outputs
        loss = self._loss_fn(outputs, y).to(self.dtype)
        right = torch.full_like(loss, torch.nan)
        if outputs.dim() == 2 and y.dim() == 1 and not y.is_floating_point():
            right = (outputs.argmax(1) == y).sum().to(self.dtype)
        return torch.stack([share * loss, right])

    def rows_that_fit(self, batches: list[tuple[Tensor, Tensor]]) -> int | None:
        """How many rows may go through the model at once; None: as they come."""
        if any(m.training for m in self._model.modules()):
            return None  # the batches are what is normalised over
        device = batches[0][0].device
        if device.type == "cpu":
            return _CPU_ROWS
        if device.type != "cuda":
            return None
        x, y = (part[:64] for part in batches[0])
        with torch.no_grad():
            self._batch(x, y, 1.0)  # once before, so that what is kept is there
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._batch(x, y, 1.0)
        each = max(torch.cuda.max_memory_allocated(device) - before, 1) / len(x)
        return max(1, int(torch.cuda.mem_get_info(device)[0] / 4 / each))


class _Run:
    """Tensors of one dtype that move together, side by side in memory."""

    def __init__(self, tensors: dict[str, Tensor], directions: Directions) -> None:
        starts, end = [], 0
        for tensor in tensors.values():
            starts.append(end)
            end += -(-tensor.numel() // _APART) * _APART
        like = next(iter(tensors.values()))

        def laid_out(state: Any) -> tuple[Tensor, list[Tensor]]:
            run = torch.zeros(end, dtype=like.dtype, device=like.device)
            views = [_view(run, s, t) for s, t in zip(starts, tensors.values(), strict=True)]
            for name, view in zip(tensors, views, strict=True):
                if name in state:
                    view.copy_(state[name])
            return run, views

        self._origin, _ = laid_out(directions.origin)
        self._axes = [laid_out(axis)[0] for axis in directions.axes]
        self._weights, views = laid_out(directions.origin)
        for tensor, view in zip(tensors.values(), views, strict=True):
            tensor.data = view
        # A variance that leaves the line's ends behind may come out negative.
        self._variances = [
            view for name, view in zip(tensors, views, strict=True) if name.endswith("running_var")
        ]

    def move(self, place: Tensor) -> None:
        weights = self._origin
        for axis, coordinate in zip(self._axes, place.to(weights.dtype), strict=True):
            weights = torch.addcmul(weights, axis, coordinate, out=self._weights)
        for variance in self._variances:
            variance.clamp_(min=0)


def _in_runs(model: nn.Module, directions: Directions) -> list[_Run]:
    """Lay out what the directions move, by dtype."""
    named = dict([*model.named_parameters(), *model.named_buffers()])
    moving = {name for axis in directions.axes for name in axis}
    kinds: dict[torch.dtype, dict[str, Tensor]] = {}
    for name in sorted(moving, key=list(named).index):
        kinds.setdefault(named[name].dtype, {})[name] = named[name]
    return [_Run(tensors, directions) for tensors in kinds.values()]


def _view(run: Tensor, start: int, like: Tensor) -> Tensor:
    """A part of a run with a tensor's shape; channel after channel for a convolution's weight."""
    part = run[start : start + like.numel()]
    if like.dim() != 4:
        return part.view(like.shape)
    out, channels, height, width = like.shape
    return part.view(out, height, width, channels).permute(0, 3, 1, 2)
