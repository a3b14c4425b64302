"""Every sample's outputs, `lag` epochs ago.

A ring of `lag` slots: slot e mod lag is read in epoch e, when it holds the outputs of epoch
e - lag, and is overwritten with those of epoch e. Each row carries the epoch it was written in and
counts only if that is exactly `lag` epochs ago. So a sample that was dropped, padded, drawn twice
or not yet seen has no reference, rather than a wrong one.

The ring is one flat table: row `slot * samples + sample`, and a last row that takes what must not
be kept, so that no step has to ask the device which rows those are. What depends on the epoch
is held in tensors beside the table, so that a compiled or captured step follows `set_epoch`.

The tensors are attributes rather than buffers: a module that holds the memory may be moved, cast
to half precision or wrapped for data-parallel training, and none of that may touch the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saltflat._gather import gather
from saltflat._mapped import mapped_table
from saltflat._rings import NEVER, Rings
from saltflat._sources import Ring, Staged
from saltflat._staging import Staging
from saltflat.codecs import codec_for

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Location(NamedTuple):
    """Where a batch lies in the ring, on the ring's own device."""

    rows: Tensor
    """A row of the table for each sample; the last row where the index is out of range."""
    in_range: Tensor | None
    """Which indices are in range; None where all are known to be."""
    places: Tensor | None = None
    """Where the rows are those of all ranks: for each sample of this one, where its reference will
    be among what they send."""

    @property
    def batch(self) -> int:
        """How many samples it is of."""
        return len(self.rows if self.places is None else self.places)


class OutputMemory(Rings):
    """The outputs of `num_samples` samples in the last `lag` epochs.

    Args:
        num_samples: Indices run from 0 to num_samples - 1.
        num_classes: The length of one row of logits.
        lag: How many epochs ago a row must have been written to count.
        storage: "float32", "float16" or "uint8"; see `saltflat.codecs`.
        device: Where the table lies. None: with the logits. "cpu" with logits on a GPU: in host
            memory, reached through pinned buffers and asynchronous copies.
        path: A file to hold the table, for tables larger than RAM. It is created sparse and takes
            space as rows are written. It is scratch space; what lasts is `state_dict()`.
        block: The samples that are kept here, where each of several processes keeps some; all
            unless said. Others are out of range.

    Raises:
        ValueError: If a size is not a positive whole number, the storage is unknown, or the file
            cannot be used.

    Example:
        >>> import torch
        >>> memory = OutputMemory(num_samples=2, num_classes=3, lag=1)
        >>> memory.set_epoch(0)
        >>> memory.write(memory.locate(torch.tensor([1])), torch.tensor([[1.0, 2.0, 3.0]]))
        >>> memory.set_epoch(1)
        >>> reference, valid = memory.read(memory.locate(torch.tensor([0, 1])))
        >>> reference[1], valid
        (tensor([1., 2., 3.], dtype=torch.float16), tensor([False,  True]))
    """

    def __init__(
        self,
        num_samples: int,
        num_classes: int,
        *,
        lag: int = 3,
        storage: str = "float16",
        device: torch.device | str | None = None,
        path: str | Path | None = None,
        block: range | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(num_samples=num_samples, num_classes=num_classes, lag=lag)
        if path is not None and device is not None and torch.device(device).type != "cpu":
            raise ValueError(f"a table in a file is in host memory: leave out device={device!r}")
        self.num_samples = num_samples
        self.num_classes = num_classes
        self.lag = lag
        self.storage = storage
        self._block = range(num_samples) if block is None else block
        self._codec = codec_for(storage)
        self._follows_logits = device is None and path is None
        self._begun = False
        self._traffic: Staging | None = None

        # A table that follows the logits has no memory yet: "meta" until they are seen.
        place = "meta" if self._follows_logits else device or "cpu"
        shape = (lag * len(self._block) + 1, self._codec.width(num_classes))
        self._table = (
            torch.zeros(shape, dtype=self._codec.dtype, device=place)
            if path is None
            else mapped_table(Path(path), shape, self._codec.dtype)
        )
        self._stamps = torch.full(shape[:1], NEVER, dtype=torch.int32, device=place)

        # The slot's first row, the epoch now, the epoch wanted, and indices out of range so far.
        self._clock = torch.zeros(
            4, dtype=torch.int64, device="cpu" if self._follows_logits else place
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the table and its stamps."""
        return self._table.nbytes + self._stamps.nbytes

    @staticmethod
    def estimate_bytes(
        num_samples: int, num_classes: int, *, lag: int = 3, storage: str = "float16"
    ) -> int:
        """What `nbytes` of such a memory is."""
        _check_sizes(num_samples=num_samples, num_classes=num_classes, lag=lag)
        codec = codec_for(storage)
        row = codec.width(num_classes) * codec.dtype.itemsize + torch.int32.itemsize
        return (lag * num_samples + 1) * row

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: its outputs are written, those of `epoch - lag` are read.

        Raises:
            ValueError: If the epoch is not a whole number from 0 or goes backwards; or if, since
                the last call, indices on a device were out of range.
        """
        if out_of_range := int(self._clock[3]):
            self._clock[3] = 0
            raise ValueError(
                f"{out_of_range} indices since the last set_epoch were outside "
                f"{self._taken.start}..{self._taken.stop - 1}; they were neither read nor written. "
                f"{self._remedy()}"
            )
        super().set_epoch(epoch)

    def _begin(self, epoch: int | None) -> None:
        self.settle()
        super()._begin(epoch)
        self._begun = epoch is not None
        if epoch is not None:
            now = (epoch % self.lag * len(self._block), epoch, epoch - self.lag)
            self._clock[:3].copy_(torch.tensor(now, device="cpu"))

    def locate(self, index: Tensor, device: torch.device | str = "cpu") -> Location:
        """Find the rows of a batch.

        An index that the host can see is checked at once. Where both index and table are on a GPU
        it is not waited for: what is out of range has no reference, is not written, and is
        reported by the next `set_epoch`.

        Args:
            index: Whole numbers of shape (batch,), best left on the CPU as the loader gave them.
            device: Where the batch's logits are.

        Raises:
            ValueError: If the index is not a vector of whole numbers of samples that are kept here.
            RuntimeError: If no epoch has begun.
        """
        index, known = self._checked(index, torch.device(device))
        index = self._local(index)
        if known:
            return Location(index + self._clock[0], None)
        in_range = (index >= 0) & (index < len(self._block))
        self._clock[3] += (~in_range).sum()
        return Location(self._rows(index, in_range), in_range)

    def _local(self, index: Tensor) -> Tensor:
        """Samples counted from the first that is kept here."""
        return index - self._block.start if self._block.start else index

    def _rows(self, local: Tensor, in_range: Tensor) -> Tensor:
        return torch.where(in_range, local + self._clock[0], len(self._table) - 1)

    @property
    def _taken(self) -> range:
        """The indices that are in range."""
        return self._block

    def _remedy(self) -> str:
        """What to do about an index that is not."""
        if len(self._taken) == self.num_samples:
            return "num_samples must be the length of the whole training set"
        return (
            'with exchange="own" a rank takes its own samples only, as StickySampler sends them; '
            'exchange="any" goes with any sampler'
        )

    def _checked(self, index: Tensor, device: torch.device) -> tuple[Tensor, bool]:
        """The index on the table's device, and whether all of it is known to be in range."""
        if not self._begun:
            raise RuntimeError("call set_epoch(epoch) at the start of every epoch")
        if index.dim() != 1 or index.dtype not in _WHOLE:
            raise ValueError(
                "index must be a vector of whole numbers, got "
                f"{index.dtype} of shape {tuple(index.shape)}"
            )
        self._place(device)
        device = self._table.device
        if "cpu" not in (index.device.type, device.type) or torch.compiler.is_compiling():
            return index.to(device, torch.int64, non_blocking=True), False
        index = index.to("cpu", torch.int64)
        if len(index):
            least, greatest = map(int, torch.aminmax(index))
            first, last = self._taken.start, self._taken.stop - 1
            if least < first or greatest > last:
                raise ValueError(
                    f"index must be within {first}..{last}, got {least} to {greatest}: "
                    f"{self._remedy()}"
                )
        return index.to(device, non_blocking=True), True

    def prefetch(self, index: Tensor, device: torch.device | str) -> None:
        """Begin to fetch a batch's references, where the table is in host memory.

        Args:
            index: As for `locate`; the same must be located next.
            device: The GPU that will want them; anything else has nothing to wait for.
        """
        device = torch.device(device)
        if self._crosses(device):
            self._staging().prefetch(self.locate(index, device).rows, device)

    def source(self, index: Tensor, logits: Tensor) -> Ring | Staged:
        """Where the kernels of `saltflat._fused` find a batch's references; see `sent`."""
        if self._crosses(logits.device):
            return self._staged(self.locate(index, logits.device), logits.device)
        index, _ = self._checked(index, logits.device)
        return Ring(
            self._table,
            self._stamps,
            self._clock,
            self._local(index).contiguous(),
            len(self._block),
            self.storage,
        )

    def _staged(self, location: Location, device: torch.device) -> Staged:
        stored, valid = self._fetch(location, device)
        return Staged(stored, valid, torch.empty_like(stored), location.rows, self.storage)

    def sent(self, source: Ring | Staged, finite: Tensor) -> None:
        """Take what the kernels left of a batch; a ring on the GPU has it already."""
        if source.mode == "staged":
            self._send(source.rows, source.outgoing, finite != 0)

    def read(
        self, location: Location, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor]:
        """The outputs of `lag` epochs ago and whether there are any, for each sample.

        Args:
            location: From `locate`.
            device: Where to put them; the table's own device unless said.

        Returns:
            References of shape (batch, classes), meaningless where not valid, and booleans of
            shape (batch,).
        """
        device = self._table.device if device is None else torch.device(device)
        stored, valid = self._fetch(location, device)
        return self._codec.decode(stored), valid

    def _fetch(self, location: Location, device: torch.device) -> tuple[Tensor, Tensor]:
        """The stored form of a batch's references, and whether each counts."""
        if self._crosses(device):
            stored, valid = self._staging().fetch(location.rows, device)
        else:
            self.settle()
            found = gather(self._table, self._stamps, location.rows, self._clock[2], False)
            stored, valid = (part.to(device) for part in found)
        if location.in_range is not None:
            valid &= location.in_range.to(device)
        return stored, valid

    def write(self, location: Location, logits: Tensor, keep: Tensor | None = None) -> None:
        """Record a batch's outputs in this epoch; of a sample drawn twice, the later ones.

        Args:
            location: From `locate`.
            logits: The outputs, of shape (batch, classes).
            keep: Booleans of shape (batch,); a row that is False stays as it was.

        Raises:
            ValueError: If the shapes do not fit.
        """
        if logits.shape != (location.batch, self.num_classes):
            raise ValueError(
                f"logits must be of shape ({location.batch}, {self.num_classes}) for an index "
                f"of length {location.batch}, got {tuple(logits.shape)}"
            )
        stored = self._codec.encode(logits.detach().to(torch.float32))
        if keep is None:
            keep = torch.ones(len(stored), dtype=torch.bool, device=logits.device)
        self._send(location.rows, stored, keep)

    def _send(self, rows: Tensor, stored: Tensor, keep: Tensor) -> None:
        if self._crosses(stored.device):
            self._staging().send(rows, stored, keep)
        else:
            self.settle()
            self._put(rows, stored.to(self._table.device), keep.to(self._table.device))

    def _put(self, rows: Tensor, stored: Tensor, keep: Tensor) -> None:
        last = len(self._table) - 1
        rows = torch.where(keep, rows, last)
        rows, order = rows.sort(stable=True)
        repeated = rows[:-1] == rows[1:]
        rows[:-1].masked_fill_(repeated, last)
        self._table.index_copy_(0, rows, stored.index_select(0, order))
        # index_fill_ would do, were it not to wait for the device to learn the value.
        self._stamps.index_copy_(0, rows, self._clock[1].to(torch.int32).expand(len(rows)))

    def _staging(self) -> Staging:
        if self._traffic is None:
            self._traffic = Staging(self._gather_pinned, self._put)
        return self._traffic

    def _gather_pinned(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return gather(self._table, self._stamps, rows, self._clock[2], True)

    def settle(self) -> None:
        """Have in the table what was written."""
        if self._traffic is not None:
            self._traffic.settle()

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return {**self.__dict__, "_traffic": None}

    def _crosses(self, device: torch.device) -> bool:
        """Whether rows travel between a GPU and a table that stays in host memory."""
        stays = not self._follows_logits and self._table.device.type == "cpu"
        return stays and device.type == "cuda"

    def _take_place(self, device: torch.device) -> None:
        if self._table.is_meta:
            self._place(device)

    @torch.inference_mode(False)
    def _place(self, device: torch.device) -> None:
        """Bring a table that follows the logits to where they are."""
        if not self._follows_logits or self._table.device == device:
            return
        if self._table.is_meta:
            self._table = torch.zeros_like(self._table, device=device)
            self._stamps = torch.full_like(self._stamps, NEVER, device=device)
        for name in ("_table", "_stamps", "_clock"):
            setattr(self, name, getattr(self, name).to(device))

    def extra_repr(self) -> str:
        return (
            f"num_samples={self.num_samples}, num_classes={self.num_classes}, lag={self.lag}, "
            f"storage={self.storage!r}, {self.nbytes:,} bytes on {self._table.device}"
        )


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
