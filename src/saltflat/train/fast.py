"""Steps on the GPU alone: images that live there, and steps recorded once and replayed.

Of a small network the GPU computes a step in less time than Python takes to launch it. So the
images are on the device, an epoch's order and random numbers are copied there when it begins, and a
step, from the crop to the moving average, is captured in a CUDA graph and replayed.

Python decides nothing in a replayed step. What changes from one to the next is read from tensors:
the place in the epoch, the learning rate, the teacher's decay. Steps in which Python would do
something else (before and after `start_epoch` and `freeze_epoch`; where LookSAM climbs, and
between) are of different kinds and have a graph each. The first steps of a kind are taken one
operation at a time, because much is compiled, tuned or allocated when it is first used.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from saltflat.core.cuda_graph import Replay, record, tuned, withhold_ticks
from saltflat.train.augment import Batch, Draws, TrainLoader, augmented, statistics
from saltflat.train.config import Config
from saltflat.train.data import Data
from saltflat.train.state import State
from saltflat.train.step import Steps, build_step, plain_steps

_WARM_UP = 3
"""Steps of a kind before it is recorded."""


def build_steps(
    config: Config, state: State, data: Data, loader: TrainLoader, device: torch.device
) -> Steps:
    """The steps of a run: recorded where that is possible, plain elsewhere."""
    if state.plain_because is None:
        return _Recorded(config, state, data, loader, device)
    if config.fast and device.type == "cuda" and state.ranks.first:
        _say(state.plain_because)
    return plain_steps(config, state, loader)


def own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """The stream of a run: what it records may not touch the default one."""
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


class _Recorded:
    """`Steps` that are replayed."""

    def __init__(
        self, config: Config, state: State, data: Data, loader: TrainLoader, device: torch.device
    ) -> None:
        self._config, self._state, self._loader = config, state, loader
        self._images = data.train.images.to(device)
        self._labels = data.train.labels.to(device)
        self._statistics = statistics(data, device)
        self._order = loader.order(0).flatten().to(device)
        self._draws = [
            Draws(*(numbers.to(device) for numbers in draws)) for draws in self._drawn(0)
        ]
        self._at = torch.arange(state.batch_size, device=device)
        """The next batch's places in the order."""
        self._step = build_step(config, state.training, state.model, state.sums)
        self._graphs: dict[Any, Replay] = {}
        self._taken: Counter[Any] = Counter()
        self._records = True
        # One pool of memory for all the graphs: only one of them runs at a time.
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __call__(self, epoch: int, skip: int) -> Iterator[None]:
        self._order.copy_(self._loader.order(epoch).flatten())
        for draws, new in zip(self._draws, self._drawn(epoch), strict=True):
            for numbers, now in zip(draws, new, strict=True):
                numbers.copy_(now)
        self._at.copy_(torch.arange(len(self._at)) + skip * len(self._at))
        for _ in range(skip, len(self._loader)):
            self._one()
            yield

    def _drawn(self, epoch: int) -> list[Draws]:
        return self._loader.draws(epoch, views=self._state.training.another_view)

    def _one(self) -> None:
        """Take the next step: replay the graph of its kind, or run it and soon capture one."""
        training = self._state.training
        key = training.graph_key()
        if self._records and key not in self._graphs and self._taken[key] >= _WARM_UP:
            try:
                with tuned():
                    self._graphs[key] = record(self._whole, self._pool)
            except RuntimeError as error:
                self._records = False
                _say(str(error).partition("\n")[0])
        if key in self._graphs:
            self._graphs[key]()
        else:
            with tuned():
                self._whole()
            self._taken[key] += 1
        training.tick()

    @withhold_ticks()
    def _whole(self) -> None:
        """A step, from the places in the order to the next ones."""
        index = self._order[self._at]
        raw, config, state = self._images[index], self._config.data, self._state
        images, *views = (
            augmented(raw, draws.of(index), config, *self._statistics) for draws in self._draws
        )
        self._step(Batch(index, images, self._labels[index], None, *views))
        state.training.after_step(state.model)
        self._at += len(self._at)


def _say(reason: str) -> None:
    print(f"steps are taken one operation at a time: {reason}", file=sys.stderr)
