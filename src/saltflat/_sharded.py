"""A memory of which every rank keeps a block, and which takes any sample on any rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from saltflat._sources import Ring, Staged
from saltflat.core import cuda_graph
from saltflat.exchange import Exchange
from saltflat.memory import Location, OutputMemory


class ShardedMemory(OutputMemory):
    """OutputMemory for ranks that make the same calls at the same time.

    What it holds equals what one process holds that is given the ranks' batches one behind the
    other; so of a sample that several ranks have, the last rank's outputs stay. A `Location` has
    the rows of all ranks' batches.

    Outputs are on their way while the backward pass runs, and are put into the table when it is
    next looked at. In a CUDA graph they are put there at once: a recording may not leave anything
    on its way.
    """

    def __init__(self, exchange: Exchange, num_classes: int, **kwargs: Any) -> None:
        super().__init__(exchange.num_samples, num_classes, block=exchange.block, **kwargs)
        self._exchange = exchange
        self._arriving: tuple[Tensor, Callable[[], tuple[Tensor, Tensor]], bool] | None = None
        """Rows, what waits for their outputs, and whether they were sent by a recorded step."""

    @property
    def _taken(self) -> range:
        return range(self.num_samples)

    def locate(self, index: Tensor, device: torch.device | str = "cpu") -> Location:
        index, known = self._checked(index, torch.device(device))
        if self._crosses(torch.device(device)):
            raise ValueError(
                f"ranks cannot exchange outputs between logits on {device} and a table in host "
                'memory: leave out device and path, or use exchange="own" with a StickySampler'
            )
        if not known:
            self._clock[3] += ((index < 0) | (index >= self.num_samples)).sum()
        self.settle()
        asked, places = self._exchange.ask(index)
        local = self._local(asked)
        mine = (local >= 0) & (local < len(self._block))
        return Location(self._rows(local, mine), mine, places)

    def source(self, index: Tensor, logits: Tensor) -> Ring | Staged:
        return self._staged(self.locate(index, logits.device), logits.device)

    def _fetch(self, location: Location, device: torch.device) -> tuple[Tensor, Tensor]:
        stored, valid = super()._fetch(location, device)
        return self._exchange.fetch(stored, valid, cast(Tensor, location.places))

    def _send(self, rows: Tensor, stored: Tensor, keep: Tensor) -> None:
        self._arriving = rows, self._exchange.give(stored, keep), cuda_graph.capturing()
        if cuda_graph.capturing():
            self.settle()

    def settle(self) -> None:
        if self._arriving is None:
            return
        rows, arrived, recorded = self._arriving
        if cuda_graph.capturing() and not recorded:
            raise RuntimeError(
                "a step before this capture has sent outputs that have not arrived: call "
                "saf.settle() before a CUDA graph is captured or replayed"
            )
        self._arriving = None
        self._put(rows, *arrived())
