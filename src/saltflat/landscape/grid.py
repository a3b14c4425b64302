"""Evaluate losses at many points of a line or plane, and check their precision.

On a GPU the work for one point is captured as a CUDA graph and replayed for all other points.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.core.cuda_graph import GraphedStep, tuned
from saltflat.landscape.directions import Directions, Tensors
from saltflat.teacher.fold import FoldedTwin

Loss = Callable[[Tensor, Tensor], Tensor]
Batches = list[tuple[Tensor, Tensor]]
TOLERANCE = (0.01, 0.02)
"""Allowed difference of bf16 losses: absolute, plus relative."""
_CPU_ROWS = 128
"""Rows of a forward pass on a CPU, whose caches are small."""


class PerturbedModel:
    """A copy of a model that can move to any point of a line or plane.

    Args:
        model: The model to copy.
        directions: The line or plane.
        batchnorm: "eval" for running statistics, "batch" for those of each batch.
        fold: Whether to fold BatchNorm into convolutions where possible.
    """

    def __init__(
        self, model: nn.Module, directions: Directions, *, batchnorm: str, fold: bool
    ) -> None:
        copied = copy.deepcopy(model).requires_grad_(False).eval()
        copied.to(memory_format=torch.channels_last)
        named = dict([*copied.named_parameters(), *copied.named_buffers()])
        moving = [name for name in named if any(name in axis for axis in directions.axes)]

        def laid_out(tensors: Tensors) -> list[Tensor]:
            zeros = {name: torch.zeros_like(named[name]) for name in moving}
            return [zeros[n].copy_(tensors[n]) if n in tensors else zeros[n] for n in moving]

        self._weights = [named[name] for name in moving]
        self._origin = laid_out(directions.origin)
        self._axes = [laid_out(axis) for axis in directions.axes]
        self._variances = [named[name] for name in moving if name.endswith("running_var")]
        self._model = copied
        self._twin: FoldedTwin | None = None
        if batchnorm == "batch":
            for module in copied.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.train()
                    module.track_running_stats = False
        elif fold:
            with suppress(ValueError):  # not traceable, or nothing to fold
                self._twin = FoldedTwin(copied)
        self.folded = self._twin is not None

    def move(self, point: Tensor) -> None:
        """Set the weights to origin + sum of coordinate * axis. A CUDA graph can capture it."""
        torch._foreach_copy_(self._weights, self._origin)
        for axis, coordinate in zip(self._axes, point.unbind(), strict=True):
            torch._foreach_add_(self._weights, torch._foreach_mul(axis, coordinate))
        for variance in self._variances:
            variance.clamp_(min=0)  # negative beyond the ends of a line
        if self._twin is not None:
            self._twin.refresh()

    def __call__(self, x: Tensor) -> Tensor:
        return (self._model if self._twin is None else self._twin)(x)


class SurfaceEvaluator:
    """Losses and numbers of correct answers at points of a line or plane.

    Args:
        model: The model to copy; it stays unchanged.
        loss_fn: Maps outputs and labels to the mean loss of the rows.
        batches: Inputs and labels on the model's device.
        directions: The line or plane.
        batchnorm: "eval" for running statistics, "batch" for those of each batch.
        half: Whether to compute in bfloat16. Weights are computed in float32 and then rounded.
        fold: Whether to fold BatchNorm into convolutions where possible.
        capture: Whether to use a CUDA graph on a GPU.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batches: Batches,
        directions: Directions,
        *,
        batchnorm: str,
        half: bool,
        fold: bool = True,
        capture: bool = True,
    ) -> None:
        self._model = PerturbedModel(model, directions, batchnorm=batchnorm, fold=fold)
        self._loss_fn, self._half = loss_fn, half
        own = next(iter(directions.origin.values())).dtype
        self._dtype = torch.promote_types(own, torch.float32)
        self._device = batches[0][0].device
        self._rows = sum(len(x) for x, _ in batches)
        if batchnorm == "eval":  # or the batches define the statistics
            batches = self._resized(batches)
        self._batches = [(_channels_last(x), y) for x, y in batches]
        self._step: Callable[[Tensor], Tensor] = (
            GraphedStep(self._losses_at) if capture else self._losses_at
        )
        self._captures = capture and self._device.type == "cuda"
        self._precision = "bf16" if half else str(own).removeprefix("torch.")

    @property
    def how(self) -> str:
        """How the losses are computed, in words."""
        folded = ["BatchNorm folded"] if self._model.folded else []
        return ", ".join([self._precision, *folded, *(["CUDA graph"] if self._captures else [])])

    @torch.no_grad()
    def __call__(self, points: Tensor) -> Tensor:
        """Return a row (mean loss, correct answers) for each row of coordinates.

        The second is NaN where labels are not classes. The device is read once, at the end.

        Raises:
            ValueError: If `loss_fn` does not return a tensor of one number.
        """
        points = points.to(self._dtype).to(self._device)
        table = points.new_empty(len(points), 2)
        with torch.cuda.device_of(table), tuned():
            for row, point in zip(table, points, strict=True):
                row.copy_(self._losses(point))
        return table.cpu().double()

    def _losses(self, point: Tensor) -> Tensor:
        try:
            return self._step(point)
        except RuntimeError as error:
            losses = self._losses_at(point)  # raises again unless the capture was the cause
            self._step, self._captures = self._losses_at, False
            reason = str(error).partition("\n")[0]
            warnings.warn(f"losses are computed without a CUDA graph: {reason}", stacklevel=3)
            return losses

    def _losses_at(self, point: Tensor) -> Tensor:
        self._model.move(point)
        return torch.stack([self._batch_losses(x, y) for x, y in self._batches]).sum(0)

    def _batch_losses(self, x: Tensor, y: Tensor) -> Tensor:
        """This batch's share of the mean loss, and its correct answers."""
        with torch.autocast(x.device.type, torch.bfloat16, self._half, cache_enabled=False):
            outputs = self._model(x)
        outputs = outputs.float() if self._half else outputs
        loss = self._mean_loss(outputs, y)
        correct = torch.full_like(loss, torch.nan)
        if outputs.dim() == 2 and y.dim() == 1 and not y.is_floating_point():
            correct = (outputs.argmax(1) == y).sum().to(self._dtype)
        return torch.stack([loss * (len(x) / self._rows), correct])

    def _mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        loss = self._loss_fn(outputs, y)
        if not isinstance(loss, Tensor) or loss.dim():
            found = tuple(loss.shape) if isinstance(loss, Tensor) else loss
            raise ValueError(f"loss_fn must return a tensor of shape (), the mean, got {found!r}")
        return loss.to(self._dtype)

    @torch.no_grad()
    def loss_fingerprint(self) -> str:
        """The losses of random outputs up to 1, 10 and 100, the same in every call.

        Equal to five digits for equal loss functions and labels.
        """
        x, y = (part[:64] for part in self._batches[0])
        like = self._model(x)
        random = torch.rand(like.shape, generator=torch.Generator().manual_seed(0)).to(like)
        losses = (self._mean_loss(scale * random, y).item() for scale in (1, 10, 100))
        return " ".join(f"{loss:.5g}" for loss in losses)

    def _resized(self, batches: Batches) -> Batches:
        """The same rows in batches as large as the device works well with."""
        rows = self._rows_that_fit(*batches[0]) if self._device.type == "cuda" else _CPU_ROWS
        x, y = (torch.cat(parts).split(rows) for parts in zip(*batches, strict=True))
        return list(zip(x, y, strict=True))

    @torch.no_grad()
    def _rows_that_fit(self, x: Tensor, y: Tensor) -> int:
        """Rows whose activations fill a quarter of the free memory."""
        x, y = x[:64], y[:64]
        self._batch_losses(x, y)  # allocates what stays, such as cuDNN's workspace
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._batch_losses(x, y)
        each = max(torch.cuda.max_memory_allocated(self._device) - before, 1) / len(x)
        return max(1, int(torch.cuda.mem_get_info(self._device)[0] / 4 / each))


def check_precision(
    make: Callable[..., SurfaceEvaluator],
    exact: SurfaceEvaluator,
    directions: Directions,
    span: float,
    *,
    half: bool,
    forced: bool,
) -> tuple[SurfaceEvaluator, dict[str, Any]]:
    """Choose bf16 where its losses are close to the model's own, and its precision elsewhere.

    Args:
        make: Builds an evaluator from `half`.
        exact: The evaluator to compare with, at the origin, the centre and the corners.
        directions: The line or plane.
        span: The surface's span.
        half: Whether to try bf16.
        forced: Whether to use bf16 even if its losses are not close.

    Returns:
        The evaluator, and what the provenance says about it.
    """
    around = zip(directions.centre, directions.reach, strict=True)
    corners = product(*[(c - span * r, c + span * r) for c, r in around])
    origin = [0.0] * len(directions.axes)
    points = torch.tensor([origin, directions.centre, *corners], dtype=torch.float64)
    expected = exact(points)[:, 0].numpy()
    known = np.isfinite(expected)
    size = np.abs(expected[known])
    for halved in (True, False) if half else (False,):
        evaluator = make(half=halved)
        apart = np.nan_to_num(np.abs(evaluator(points)[:, 0].numpy() - expected)[known], nan=inf)
        if forced or (apart <= TOLERANCE[0] + TOLERANCE[1] * size).all():
            break
    difference = {
        "absolute": float(apart.max(initial=0.0)),
        "relative": float((apart / np.maximum(size, 1e-12)).max(initial=0.0)),
    }
    origin_loss = float(expected[0])
    return evaluator, {"how": evaluator.how, "origin_loss": origin_loss, "difference": difference}


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
