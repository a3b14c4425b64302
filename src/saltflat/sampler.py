"""StickySampler: every sample on the rank that keeps its outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from saltflat.core.distributed import world
from saltflat.exchange import block


class StickySampler(Sampler[int]):
    """Sends every sample to one rank in all epochs, and shuffles inside it.

    With it, `SAF(..., exchange="own")` finds all outputs where they are needed, and ranks exchange
    nothing. All ranks get equally many samples: a rank whose block is shorter repeats some of its
    own, or all but the shortest leave some out.

    A rank's samples are a contiguous block of the data set. If that is sorted by class, as folders
    of images are, give it a fixed random order first, or each rank will see some classes only:
    `Subset(dataset, torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)))`,
    and `with_index` around it.

    Args:
        num_samples: The length of the data set.
        num_replicas: How many ranks there are; those of the default process group unless said.
        rank: Which of them this is; likewise.
        shuffle: Whether a rank's samples come in another order in each epoch.
        seed: What the orders depend on, beside epoch and rank.
        drop_last: Whether samples are left out, rather than repeated, to have equally many.

    Raises:
        ValueError: If the rank is not one of the replicas, or would have no sample.

    Example:
        >>> samplers = [StickySampler(5, num_replicas=2, rank=rank) for rank in (0, 1)]
        >>> [sorted(sampler) for sampler in samplers]
        [[0, 1, 2], [3, 4, 4]]
    """

    def __init__(
        self,
        num_samples: int,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        here, size = world(None)
        self.num_replicas = size if num_replicas is None else num_replicas
        self.rank = here if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(
                f"rank must be within 0..{self.num_replicas - 1} for num_replicas="
                f"{self.num_replicas}, got {self.rank}"
            )
        first, last = (block(num_samples, self.num_replicas, r) for r in (0, self.num_replicas - 1))
        if not last:
            raise ValueError(
                f"{num_samples} samples in {self.num_replicas} blocks of {len(first)} leave the "
                "last rank without any: use fewer ranks"
            )
        self.samples = block(num_samples, self.num_replicas, self.rank)
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._length = len(last if drop_last else first)

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(len(self.samples))
        if self.shuffle:
            # Other orders on other ranks, or the same samples would always meet in a batch.
            seed = self.seed + self.epoch * self.num_replicas + self.rank
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))
        for number in range(self._length):
            yield self.samples[int(order[number % len(order)])]

    def __len__(self) -> int:
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins, as to a DistributedSampler."""
        self.epoch = epoch
