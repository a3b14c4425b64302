"""Losses at many places of a line or plane, quickly.

The places' weights are made on the device, in a copy of the model whose moving tensors lie in one
run of memory: origin + a * first axis + b * second. In eval mode, convolutions take in BatchNorm
where they can. On a GPU, the work for a place is recorded once and replayed for all of them, with
coordinates read and losses written by a counter there, and for several places side by side.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from saltflat._capture import record, tuned
from saltflat._folded import Folding
from saltflat.landscape.directions import Directions

Batches = Iterable[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]
CHUNK = 128
"""Places from one look at the device to the next."""
LANES = 2
"""Places that a GPU works on side by side."""
_WARM_UP = 3
"""Times that the work is done before it is recorded: much is compiled, tuned or allocated then."""
_CPU_ROWS = 128
"""Rows at once on a CPU, whose caches are small."""
_APART = 64
"""Tensors begin at multiples of so many numbers, as kernels like it."""


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
        lanes: Places side by side, on a GPU.
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
        lanes: int = LANES,
    ) -> None:
        self.device = batches[0][0].device
        count = lanes if can_record(self.device) else 1
        double: dict[str, Any] = {"device": self.device, "dtype": torch.float64}
        self._places = torch.zeros(CHUNK + count, len(directions.axes), **double)
        self._found = torch.zeros(CHUNK + count, 2, **double)
        make = partial(_Lane, model, loss_fn, directions, batchnorm, half, fold)
        first = make()
        batches = _resized(batches, first.rows_that_fit(batches, count))
        batches = [(_channels_last(x), y) for x, y in batches]
        self._lanes = [first, *(make() for _ in range(count - 1))]
        self._counters = [torch.zeros(1, dtype=torch.long, device=self.device) for _ in self._lanes]
        self._work = partial(self._once, batches)
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
            self._beside = [torch.cuda.Stream(self.device) for _ in self._lanes[1:]]
        self._replay: Callable[[], None] | None = None
        self.how = ", ".join(
            [
                "bf16" if half else str(next(model.parameters()).dtype).removeprefix("torch."),
                *(["BatchNorm folded"] if first.folds else []),
            ]
        )

    @torch.no_grad()
    def __call__(self, places: Tensor) -> Tensor:
        """A row of the loss and the share of right answers for each row of coordinates."""
        done = []
        with self._on_stream(), torch.autocast(self.device.type, enabled=False):
            for part in places.split(CHUNK):
                self._places[: len(part)].copy_(part)
                self._places[len(part) :].copy_(part[-1])  # where a lane has nothing left to do
                self._rewind()
                for _ in range(0, len(part), len(self._lanes)):
                    self._one()
                done.append(self._found[: len(part)].to("cpu", copy=True))
        return torch.cat(done)

    def _one(self) -> None:
        if self._replay is not None:
            self._replay()
        else:
            self._work()

    def _rewind(self) -> None:
        for number, counter in enumerate(self._counters):
            counter.fill_(number)

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
                self._rewind()
                self._work()
            self._rewind()
            try:
                self._replay = record(self._work, None)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                print(f"places are taken one operation at a time: {reason}", file=sys.stderr)
                return
        beside = f", {len(self._lanes)} places at once" if len(self._lanes) > 1 else ""
        self.how += f", recorded{beside}"

    def _once(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """The next place of every lane."""
        if self._stream is None:
            for number in range(len(self._lanes)):
                self._lane(number, batches)
            return
        here = torch.cuda.current_stream(self.device)
        for number, stream in enumerate([here, *self._beside]):
            if stream is not here:
                stream.wait_stream(here)
            with torch.cuda.stream(stream):
                self._lane(number, batches)
        for stream in self._beside:
            here.wait_stream(stream)

    def _lane(self, number: int, batches: list[tuple[Tensor, Tensor]]) -> None:
        counter, lane = self._counters[number], self._lanes[number]
        lane.move(self._places.index_select(0, counter)[0])
        self._found.index_copy_(0, counter, lane.losses(batches)[None])
        counter += len(self._lanes)


class _Lane:
    """A copy of the model that moves."""

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
        self._runs = _in_runs(self._model, directions)
        for module in self._model.modules():
            if batchnorm == "batch" and isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train()
                module.track_running_stats = False
        self._folding: Folding | None = None
        if fold and batchnorm == "eval":
            with suppress(ValueError):  # nothing to fold, or no way to trace it: the model runs
                self._folding = Folding(self._model)
        self.folds = self._folding is not None

    def move(self, place: Tensor) -> None:
        """Make the weights of a place."""
        for run in self._runs:
            run.move(place)
        if self._folding is not None:
            self._folding.outdate()

    def losses(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The mean loss of all rows, and the share of right answers where these are classes."""
        total = sum(len(x) for x, _ in batches)
        parts = [self._batch(x, y) * (len(x) / total) for x, y in batches]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _batch(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, self._half, cache_enabled=False):
            twin = None
            if self._folding is not None:
                twin = self._folding.twin(self._model, (x,), {})
            outputs = self._model(x) if twin is None else twin(x)
        outputs = outputs.float() if self._half else outputs
        loss = self._loss_fn(outputs, y).double()
        if not classes(outputs, y):
            return torch.stack([loss, torch.full_like(loss, torch.nan)])
        return torch.stack([loss, (outputs.argmax(1) == y).double().mean()])

    def rows_that_fit(self, batches: list[tuple[Tensor, Tensor]], lanes: int) -> int | None:
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
            self._batch(x, y)  # once before, so that what is kept is there
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._batch(x, y)
        each = max(torch.cuda.max_memory_allocated(device) - before, 1) / len(x)
        return max(1, int(torch.cuda.mem_get_info(device)[0] / 4 / lanes / each))


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


def classes(outputs: Tensor, y: Tensor) -> bool:
    """Whether labels are classes, and outputs a number for each class."""
    return outputs.dim() == 2 and y.dim() == 1 and not y.is_floating_point()
