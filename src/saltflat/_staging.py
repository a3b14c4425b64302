"""Rows on their way between a table in host memory and a GPU: fetched ahead, written behind.

A copy from the GPU has arrived only when the GPU gets there, so what a step writes is put into the
table when the table is next needed. What a step reads may be asked for early: another thread puts
the writes in, gathers the rows and copies them over while the model runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

Gather = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From rows to their stored form and whether each counts, in pinned memory."""
Put = Callable[[Tensor, Tensor, Tensor], None]
"""Writes stored rows where they are to be kept."""


class _Pending(NamedTuple):
    rows: Tensor
    stored: Tensor
    keep: Tensor
    arrived: torch.cuda.Event


class _Fetched(NamedTuple):
    stored: Tensor
    valid: Tensor
    arrived: torch.cuda.Event


class _Ahead(NamedTuple):
    rows: Tensor
    device: torch.device
    fetched: Future[_Fetched]


class Staging:
    """The traffic of one table."""

    def __init__(self, gather: Gather, put: Put) -> None:
        self._gather, self._put = gather, put
        self._pending: list[_Pending] = []
        self._ahead: _Ahead | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def prefetch(self, rows: Tensor, device: torch.device) -> None:
        """Begin to fetch rows, for a `fetch` of the same ones."""
        self._wait()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "saltflat-prefetch")
        self._ahead = _Ahead(rows, device, self._pool.submit(self._fetch, rows, device))

    def fetch(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """The stored form of rows and whether each counts, on a GPU."""
        ahead, self._ahead = self._ahead, None
        fetched = None if ahead is None else ahead.fetched.result()
        if ahead is None or fetched is None or not self._still_true(ahead, rows, device):
            fetched = self._fetch(rows, device)
        stream = torch.cuda.current_stream(device)
        stream.wait_event(fetched.arrived)
        for tensor in fetched[:2]:
            tensor.record_stream(stream)
        return fetched.stored, fetched.valid

    def send(self, rows: Tensor, stored: Tensor, keep: Tensor) -> None:
        """Let rows on a GPU, all but those not to be kept, arrive in the table in time."""
        host = (_on_host(stored), _on_host(keep))
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(stored.device))
        self._wait()
        self._pending.append(_Pending(rows, *host, arrived))

    def settle(self) -> None:
        """Put into the table what is on its way there; what was prefetched may be true no more."""
        self._wait()
        self._ahead = None
        self._settle()

    def _wait(self) -> None:
        """Let the other thread finish: the table and the list of writes are for one at a time."""
        if self._ahead is not None:
            self._ahead.fetched.result()

    def _settle(self) -> None:
        for rows, stored, keep, arrived in self._pending:
            arrived.synchronize()
            self._put(rows, stored, keep)
        self._pending.clear()

    def _fetch(self, rows: Tensor, device: torch.device) -> _Fetched:
        self._settle()
        stored, valid = self._gather(rows)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(self._streams[device]):
            near = stored.to(device, non_blocking=True), valid.to(device, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._streams[device])
        return _Fetched(*near, arrived)

    def _still_true(self, ahead: _Ahead, rows: Tensor, device: torch.device) -> bool:
        """Whether what was fetched is what would be now: of these rows, not written since."""
        if ahead.device != device or not torch.equal(ahead.rows, rows):
            return False
        return not any(torch.isin(rows, pending.rows).any() for pending in self._pending)


def _on_host(tensor: Tensor) -> Tensor:
    """A pinned copy in host memory, complete when the current stream gets there."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
