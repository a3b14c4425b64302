"""Every sample's outputs of the last epochs, in a ring of `lag + 1` slots.

Epoch e writes slot e mod (lag + 1) and reads the slot of epoch e - lag. No epoch reads what it
writes, so every call of a step sees the same reference. A row counts only if its stamp is exactly
e - lag, and the first write of an epoch wins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saltflat.core.checks import whole_number
from saltflat.memory.host import WriteBehind, to_device
from saltflat.memory.table import SampleMemory


class Ring(SampleMemory):
    """The outputs of `num_samples` samples in the last `lag` epochs and in this one.

    Args:
        num_samples: The length of the training set.
        num_classes: The length of one row of outputs.
        lag: How many epochs ago a row must have been written to count.
        storage: "float32", "float16" or "uint8"; see `saltflat.memory.codecs`.
        device: Where the rows are. None: with the outputs. "cpu": on the host.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import torch
        >>> memory = Ring(num_samples=2, num_classes=3, lag=1, device="cpu")
        >>> memory.begin_epoch(0)
        >>> outputs = torch.tensor([[1.0, 2.0, 3.0]])
        >>> memory.write(torch.tensor([1]), outputs, keep=torch.tensor([True]))
        >>> memory.begin_epoch(1)
        >>> memory.read(torch.tensor([0, 1]), outputs.device)[1]
        tensor([False,  True])
    """

    def __init__(
        self,
        num_samples: int,
        num_classes: int,
        *,
        lag: int = 3,
        storage: str = "float16",
        device: torch.device | str | None = None,
    ) -> None:
        self.lag = whole_number("lag", lag, 1)
        super().__init__(
            num_samples, num_classes, slots=self.lag + 1, storage=storage, device=device
        )

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch: its outputs are written, those of `epoch - lag` are read."""
        self.begin(epoch, epoch % self.slots, (epoch - self.lag) % self.slots, epoch - self.lag)

    def read(self, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """The outputs of `lag` epochs ago.

        Args:
            index: Samples, on the memory's device; `num_samples` for out of range.
            device: Where to put what is read.

        Returns:
            Outputs of shape (batch, classes), meaningless where not valid; booleans (batch,).
        """
        if self._pending is not None:
            self.flush()
        rows = self._clock[1] + index.clamp(max=self.num_samples - 1)
        stored = self._table[rows]
        valid = (self._stamps[rows] == self._clock[3]) & (index < self.num_samples)
        if device != self.device:
            stored, valid = to_device(stored, device), to_device(valid, device)
        return self._codec.decode(stored), valid

    def write(self, index: Tensor, outputs: Tensor, keep: Tensor) -> None:
        """Record outputs in this epoch; a sample that has some already keeps them.

        Args:
            index: Samples, on the memory's device; `num_samples` for out of range.
            outputs: Of shape (batch, classes).
            keep: Booleans (batch,); a row that is False is not recorded.
        """
        if self._pending is not None:
            self.flush()
        stored = self._codec.encode(outputs.detach().to(torch.float32))
        if stored.device == self.device:
            self._put(index, stored, keep)
        else:
            self._pending = index, WriteBehind((stored, keep))

    def _put(self, index: Tensor, rows: Tensor, keep: Tensor) -> None:
        dump = len(self._table) - 1
        places = self._clock[0] + index.clamp(max=self.num_samples - 1)
        fresh = keep & (index < self.num_samples) & (self._stamps[places] != self._clock[2])
        places = torch.where(fresh, places, dump)
        # Of a sample's rows in the batch, the first is written and the others go to the last row.
        ordered, order = places.sort(stable=True)
        first = torch.where(ordered[1:] == ordered[:-1], dump, ordered[1:])
        places.scatter_(0, order[1:], first)
        self._table.index_copy_(0, places, rows)
        stamp = self._clock[2].to(torch.int32).expand(len(places))
        self._stamps.index_copy_(0, places, stamp)
        if self._claims is not None:
            self._claim(torch.where(places < dump, index, self.num_samples))
