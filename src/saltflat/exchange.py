"""Which rank owns which sample, and how outputs travel between ranks.

Each rank keeps the outputs of one block of samples, and a sampler may send any sample to any rank.
A step has three moves, and every rank makes them at the same time:

1. `ask`: all ranks learn which samples every rank has in its batch;
2. `fetch`: each rank sends every other the references that it owns of that one's batch;
3. `give`: all ranks get every rank's new outputs, of which each keeps those of its own samples.

Messages have one size, whatever the samples: batches are padded to the largest one, and an owner
sends a row for every row asked for, though only those that it owns are looked at. So nobody has to
wait for a device to learn how much is sent to whom, and a CUDA graph can repeat it. What travels is
the stored form of the outputs. With W ranks of B rows each, a rank receives W - 1 times B rows in
each of the last two moves; the last runs beside the backward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor

from saltflat.core.distributed import Group, world


def block(num_samples: int, world_size: int, rank: int) -> range:
    """The samples that a rank owns: equal blocks in order, cut as torch.chunk does.

    DTensor's Shard cuts likewise, so the ranks' blocks are the shards of one table.

    Example:
        >>> [block(10, 4, rank) for rank in range(4)]
        [range(0, 3), range(3, 6), range(6, 9), range(9, 10)]
    """
    size = ceil(num_samples / world_size)
    return range(min(rank * size, num_samples), min((rank + 1) * size, num_samples))


class Exchange:
    """The traffic of one memory between ranks.

    Args:
        num_samples: The length of the whole training set.
        process_group: The ranks; the default group unless said.
    """

    def __init__(self, num_samples: int, process_group: dist.ProcessGroup | None = None) -> None:
        self.num_samples = num_samples
        self.rank, self.size = world(process_group)
        self.block = block(num_samples, self.size, self.rank)
        self.batch = 0
        """Rows to which a batch is padded."""
        self._shared = Group(process_group)

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._shared.it

    def agree(self, batch: int, settings: Mapping[str, object], device: torch.device) -> None:
        """Pad batches to the largest one from now on, and see that all ranks are alike.

        Args:
            batch: Rows of this rank's batch; later ones may not be larger than any rank's now.
            settings: What must be the same on every rank.
            device: Where the ranks can talk.

        Raises:
            RuntimeError: On every rank, with the names of the settings that differ.
        """
        prints = [zlib.crc32(repr(value).encode()) for value in settings.values()]
        # Only a number that is the same everywhere is both its greatest and its least value.
        batch = max(batch, self.batch)
        greatest = torch.tensor([batch, *prints, *(-x for x in prints)], device=device)
        with _in_time("agree on the settings"):
            dist.all_reduce(greatest, dist.ReduceOp.MAX, self._group)
        batch, *extremes = greatest.tolist()
        most, least = extremes[: len(prints)], extremes[len(prints) :]
        differing = [
            f"{name} (here {value!r})"
            for (name, value), high, low in zip(settings.items(), most, least, strict=True)
            if high != -low
        ]
        if differing:
            raise RuntimeError(
                f"the ranks disagree on {', '.join(differing)}: SAF needs the same on each. "
                f"This is rank {self.rank} of {self.size}"
            )
        self.batch = batch

    def ask(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Tell all ranks which samples are in this one's batch.

        Args:
            index: Of shape (batch,), on the device of the table.

        Returns:
            The samples of all ranks, rank after rank, sample 0 behind the end of a short batch;
            and where `fetch` finds what is meant for this rank's.

        Raises:
            ValueError: If the batch is larger than was agreed.
        """
        if len(index) > self.batch:
            raise ValueError(
                f"a batch of {len(index)} rows, but the largest at the epoch's first step was of "
                f"{self.batch}: ranks exchange messages of one size, so begin with the largest"
            )
        asked = index.new_empty(self.size * self.batch)
        with _in_time("tell the other ranks which samples it has"):
            dist.all_gather_into_tensor(asked, self._padded(index), self._group)
        # An index that nobody owns, which is not valid anywhere, may be looked for anywhere.
        owner = (index // ceil(self.num_samples / self.size)).clamp(0, self.size - 1)
        return asked, owner * self.batch + torch.arange(len(index), device=index.device)

    def fetch(self, stored: Tensor, valid: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Send what other ranks asked for, and get what this one did.

        Args:
            stored: A row for each sample asked for by any rank, of this rank's table.
            valid: Which of them this rank owns and can vouch for.
            places: From `ask`.

        Returns:
            The same two for this rank's batch.
        """
        packed = _packed(stored, valid)
        received = torch.empty_like(packed)
        with _in_time("fetch references from the other ranks"):
            dist.all_to_all_single(_bytes(received), _bytes(packed), group=self._group)
        return _unpacked(received.index_select(0, places))

    def give(self, stored: Tensor, keep: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Begin to send all ranks the outputs of this one's batch.

        Args:
            stored: The outputs.
            keep: Which of them to keep.

        Returns:
            What waits for all to arrive and returns the same two of all ranks, in the order of
            `ask`.
        """
        mine = self._padded(_packed(stored, keep))
        everyones = mine.new_empty(self.size * self.batch, mine.shape[1])
        sends = "send its outputs to the other ranks"
        with _in_time(sends):
            work = dist.all_gather_into_tensor(
                _bytes(everyones), _bytes(mine), self._group, async_op=True
            )

        def arrived() -> tuple[Tensor, Tensor]:
            with _in_time(sends):
                if work is not None:
                    work.wait()
            return _unpacked(everyones)

        return arrived

    def mean(self, loss: Tensor, valid: Tensor) -> Tensor:
        """From the mean over a rank's valid rows to its part of the mean over all ranks' rows.

        Data-parallel training averages over ranks what is here a mean over rows, and ranks need
        not have equally many: so a rank's part is its sum, times the ranks, by the rows of all.
        """
        count = valid.sum()
        return loss * (self.size * count) / self.total(count).clamp(min=1)

    def total(self, count: Tensor) -> Tensor:
        """The sum of all ranks' counts of rows."""
        total = count.clone()
        with _in_time("count the rows of all ranks"):
            dist.all_reduce(total, group=self._group)
        return total

    def joined(self, part: Tensor) -> Tensor | None:
        """All ranks' parts of a table as one, in rank 0's host memory; None on the others.

        Args:
            part: Of shape (slots, samples of this rank, ...); sent slot by slot.
        """
        whole = None
        if self.rank == 0:
            shape = (len(part), self.num_samples, *part.shape[2:])
            whole = torch.empty(shape, dtype=part.dtype, device="cpu")
        for number, slot in enumerate(part):
            mine = slot.to("cpu", copy=True)  # of a view all would be sent that it is a view of
            parts = [mine] * self.size if self.rank == 0 else None
            with _in_time("join the parts of its memory"):
                dist.gather_object(mine, parts, group=self._group, group_dst=0)
            if whole is not None and parts is not None:
                torch.cat(parts, out=whole[number])
        return whole

    def _padded(self, rows: Tensor) -> Tensor:
        """Rows up to the common size; with flags of 0, those behind the end are not kept."""
        padded = rows.new_zeros(self.batch, *rows.shape[1:])
        padded[: len(rows)] = rows
        return padded


def _packed(stored: Tensor, flags: Tensor) -> Tensor:
    """Rows with a flag behind each, as one message."""
    return torch.cat([stored, flags[:, None].to(stored.dtype)], 1)


def _unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    return packed[:, :-1].contiguous(), packed[:, -1] != 0


def _bytes(rows: Tensor) -> Tensor:
    """The same memory in the one dtype that every backend can send."""
    return rows.view(torch.uint8)


@contextmanager
def _in_time(task: str) -> Iterator[None]:
    """Say what was waited for, where a collective fails or its group's time-out runs out."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"SAF could not {task}: another rank has stopped, hangs, makes fewer steps than this "
            f"one, or did not call set_epoch, or its SAF is in eval mode. {error}"
        ) from error
