"""Every sample's running average of outputs: one row a sample.

A visit moves the average m by max(1 / visits, 1 - decay) * (z - m), so that the first visits count
alike and m needs no bias correction. Of an epoch's visits only the first counts.

An average is read and written in the same epoch. In a step that calls its closure twice (SAM), the
second call reads what the first one wrote.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saltflat.core.checks import real_number
from saltflat.memory.host import WriteBehind, to_device
from saltflat.memory.table import NEVER, Field, SampleMemory


class Average(SampleMemory):
    """The running averages of `num_samples` samples' outputs, with visits and labels.

    Args:
        num_samples: The length of the training set.
        num_classes: The length of one row of outputs.
        decay: The weight of the old average after many visits.
        storage: "float32" or "float16". In "uint8" an average stops moving.
        device: Where the rows are. None: with the outputs. "cpu": on the host.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import torch
        >>> memory = Average(num_samples=1, num_classes=1, decay=0.5, device="cpu")
        >>> index, keep = torch.tensor([0]), torch.tensor([True])
        >>> for epoch, output in enumerate([0.0, 4.0, 6.0]):
        ...     memory.begin_epoch(epoch)
        ...     memory.write(index, torch.tensor([[output]]), keep, labels=torch.tensor([0]))
        >>> memory.read(index, torch.device("cpu"))[0]  # 0, then 2, then 4
        tensor([[4.]])
    """

    _visits: Tensor
    _labels: Tensor

    def __init__(
        self,
        num_samples: int,
        num_classes: int,
        *,
        decay: float = 0.9,
        storage: str = "float16",
        device: torch.device | str | None = None,
    ) -> None:
        if storage == "uint8":
            raise ValueError("storage='uint8' is too coarse for an average: choose 'float16'")
        self.decay = real_number("decay", decay)
        if decay >= 1:
            raise ValueError(f"decay must be below 1, got {decay}")
        whole = Field(torch.int32, (), 0)
        super().__init__(
            num_samples,
            num_classes,
            slots=1,
            storage=storage,
            device=device,
            fields={"visits": whole, "labels": whole._replace(fill=-1)},
        )

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.begin(epoch, 0, 0, NEVER)

    def read(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """The averages, in float32, and whether a sample was visited; see `Ring.read`."""
        self.flush()
        places = index.clamp(max=self.num_samples - 1)
        stored = self._table[places]
        valid = (self._visits[places] > 0) & (index < self.num_samples)
        if device != self.device:
            stored, valid = to_device(stored, device), to_device(valid, device)
        return self._codec.decode(stored).to(torch.float32), valid

    def write(self, index: Tensor, outputs: Tensor, keep: Tensor, labels: Tensor) -> None:
        """Move the averages toward a batch of outputs; see `Ring.write`."""
        self.flush()
        rows = torch.cat([outputs.detach().to(torch.float32), labels[:, None]], 1)
        if rows.device == self.device:
            self._put(index, rows, keep)
        else:
            self._pending = index, WriteBehind((rows, keep))

    def _put(self, index: Tensor, rows: Tensor, keep: Tensor) -> None:
        dump, outputs = self.num_samples, rows[:, :-1]
        places = index.clamp(max=self.num_samples - 1)
        fresh = keep & (index < self.num_samples) & (self._stamps[places] != self._clock[2])
        places = torch.where(fresh, places, dump)
        ordered, order = places.sort(stable=True)  # as in a `Ring`
        first = torch.where(ordered[1:] == ordered[:-1], dump, ordered[1:])
        places.scatter_(0, order[1:], first)
        visits = self._visits[places] + 1
        rate = (1 / visits).clamp(min=1 - self.decay)[:, None]
        average = torch.lerp(self._codec.decode(self._table[places]).float(), outputs, rate)
        self._table.index_copy_(0, places, self._codec.encode(average))
        self._visits.index_copy_(0, places, visits)
        self._labels.index_copy_(0, places, rows[:, -1].to(torch.int32))
        self._stamps.index_copy_(0, places, self._clock[2].to(torch.int32).expand(len(places)))
        if self._claims is not None:
            self._claim(places)
