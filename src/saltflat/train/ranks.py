"""The processes of a run: how they join, agree and stop, and what one does for all.

A run that torchrun did not start is one process, and nothing here sends anything.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from saltflat.core.distributed import world
from saltflat.train.config import Config, require

T = TypeVar("T")


class RankError(RuntimeError):
    """A task that failed on some rank, which told the others: nobody is lost."""

    def __init__(self, message: str, bad_input: bool) -> None:
        super().__init__(message)
        self.bad_input = bad_input
        """Whether it was a ValueError wherever it failed."""


@dataclass(frozen=True)
class Ranks:
    """Which process of a run this is, and how many there are."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and shows things."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.size > 1

    def gathered(self, thing: T) -> list[T]:
        """What each rank has given, in their order."""
        things: list[Any] = [thing] * self.size
        if self.several:
            dist.all_gather_object(things, thing)
        return things

    def agree(self, settings: Mapping[str, object]) -> None:
        """See to it that all ranks have the same.

        Raises:
            ValueError: On every rank, with the settings that differ and two ranks' values.
        """
        everyones = self.gathered(dict(settings))
        differing = []
        for name in dict.fromkeys(name for theirs in everyones for name in theirs):
            first, *others = (theirs.get(name) for theirs in everyones)
            for rank, other in enumerate(others, start=1):
                if other != first:
                    differing.append(f"{name} ({first!r} on rank 0, {other!r} on rank {rank})")
                    break
        require(not differing, f"the processes disagree on {'; '.join(differing)}")

    def each(self, task: Callable[[], T]) -> list[T]:
        """What a task returned on each rank; if it fails on one, an error on all of them."""
        if not self.several:
            return [task()]
        try:
            outcome: tuple[Any, str, bool] = task(), "", True
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            outcome = None, said, isinstance(error, ValueError)
        outcomes = self.gathered(outcome)
        failed = [f"rank {rank}: {said}" for rank, (_, said, _) in enumerate(outcomes) if said]
        if failed:
            raise RankError("; ".join(failed), all(bad_input for *_, bad_input in outcomes))
        return [result for result, *_ in outcomes]

    def lead(self, task: Callable[[], object]) -> None:
        """Let rank 0 do something for all; when this returns, it is done."""
        self.each(task if self.first else lambda: None)

    def in_turn(self, task: Callable[[], T]) -> T:
        """Let rank 0 do something, then a process on each machine, then all others.

        What the first has downloaded the others find, on a disk that they share or on their own.
        """
        local = int(os.environ.get("LOCAL_RANK", "0"))
        own = 0 if self.first else 1 if local == 0 else 2
        results: list[T] = []
        for turn in range(3 if self.several else 1):
            self.each((lambda: results.append(task())) if turn == own else lambda: None)
        return results[0]

    def sum(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Over all ranks."""
        if not self.several:
            return dict(figures)
        numbers = torch.tensor(list(figures.values()), dtype=torch.float64)
        dist.all_reduce(numbers)
        return dict(zip(figures, numbers.tolist(), strict=True))


ALONE = Ranks()


class Asked:
    """Whether any rank was asked to stop, as of one call before: nobody waits for the answer."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._under_way: tuple[Any, torch.Tensor] | None = None

    def __call__(self, here: bool) -> bool:
        """Tell the others whether this one was; the same answer on all of them."""
        if not self._ranks.several:
            return here
        before, flag = self._under_way, torch.tensor(int(here))
        self._under_way = dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True), flag
        if before is None:
            return False
        before[0].wait()
        return bool(before[1])


def started() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this is the process that speaks for all."""
    return started() == 1 or os.environ.get("RANK", "0") == "0"


def require_one_process(command: str) -> None:
    """Raise ValueError under torchrun, for what is not made for it."""
    require(
        started() == 1,
        f"{command} takes one process, and torchrun started {started()}: only train takes several",
    )


def device_of(config: Config) -> torch.device:
    """Where a run takes place: a GPU if there is one, unless the config says otherwise.

    Each process that torchrun started on a machine has a GPU of its own.
    """
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda" or started() == 1:
        return device
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    require(device.index is None, f"{started()} processes cannot all be on {device}: say cuda")
    require(
        local < gpus, f"process {local} of this machine has no GPU: there are {gpus}, one for each"
    )
    return torch.device("cuda", local)


@contextmanager
def joined(config: Config) -> Iterator[Ranks]:
    """The processes of a run, until it ends: those that torchrun started, or this one alone.

    Raises:
        ValueError: If they were not all given the same config.
        RuntimeError: If one of them has gone, or is not heard of for `config.timeout` seconds.
    """
    joins = started() > 1 and not dist.is_initialized()
    if joins:
        device = device_of(config)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # Tensors of the host go by gloo in any case: what is agreed on waits for no device.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        limit = timedelta(seconds=config.timeout)
        store, rank, size = _met(limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    ranks, lost = Ranks(*world(None)), False
    try:
        ranks.agree(_flat(config.__dict__))
        yield ranks
        if joins:
            dist.barrier()
    except RankError as error:
        if error.bad_input:
            raise ValueError(str(error)) from error
        raise
    except RuntimeError as error:
        lost = ranks.several and _GONE.search(str(error)) is not None
        if not lost:
            raise
        raise RuntimeError(
            f"rank {ranks.rank} of {ranks.size} lost another process, which has stopped or was not "
            f"heard of for timeout={config.timeout:g} seconds. {error}"
        ) from error
    finally:
        if joins and not lost:  # or it would wait for the lost one
            dist.destroy_process_group()


def _met(limit: timedelta) -> tuple[PrefixStore, int, int]:
    """A store that is these processes' own, the rank of this one, and how many there are.

    torchrun goes on with one store when it starts processes again, and there they would find the
    addresses of those that were killed. So rank 0 makes up a word, under which all of them meet,
    and tells it to whoever asks, until each of the others has said that it knows.
    """
    store, rank, size = next(rendezvous("env://", timeout=limit))
    mine, end = uuid.uuid4().hex, time.monotonic() + limit.total_seconds()
    if rank > 0:
        store.set(f"saltflat/asks/{rank}", mine)
        word = store.get(f"saltflat/answer/{mine}").decode()
        store.set(f"saltflat/{word}/{rank}", "knows")
        return PrefixStore(word, store), rank, size
    missing = set(range(1, size))
    while missing:
        for other in sorted(missing):
            if store.check([f"saltflat/{mine}/{other}"]):
                missing.remove(other)
            elif store.check([f"saltflat/asks/{other}"]):  # perhaps one that is no more
                store.set(f"saltflat/answer/{store.get(f'saltflat/asks/{other}').decode()}", mine)
        require(
            time.monotonic() < end,
            f"rank {min(missing, default=0)} did not come within timeout={limit.total_seconds():g} "
            "seconds",
        )
        time.sleep(0.01)
    return PrefixStore(mine, store), rank, size


_GONE = re.compile("gloo|nccl|timed? ?out|connection|SAF could not", re.IGNORECASE)
"""What is in the messages of collectives that failed."""


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Settings by their names on the command line."""
    flat: dict[str, object] = {}
    for name, value in settings.items():
        inside = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        flat |= {prefix + name: value} if inside is None else _flat(inside, f"{prefix}{name}.")
    return flat
