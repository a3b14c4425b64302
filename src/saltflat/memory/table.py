"""What every memory shares: tensors with a row a sample, placed, saved, loaded and merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from saltflat.core.checks import whole_number
from saltflat.core.distributed import world
from saltflat.memory.codecs import codec_for
from saltflat.memory.host import WriteBehind
from saltflat.memory.merge import merge_rows

NEVER = torch.iinfo(torch.int32).min
"""The stamp of a row that was never written."""
LARGEST = 2**47
"""Bytes of a memory above which the arguments must be a mistake."""


class Field(NamedTuple):
    """One tensor of a memory: a row for each sample and slot."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of one row."""
    fill: int


class SampleMemory:
    """Tensors with a row for each sample and slot, and a last row for what is not kept.

    They are plain attributes of a plain object: moving or casting a module, and DDP's broadcast of
    buffers, leave them alone. Samples are numbered 0 to `num_samples - 1`; the number `num_samples`
    stands for an index out of range.

    Args:
        num_samples: The length of the training set.
        num_classes: The length of one row of outputs.
        slots: Rows for each sample.
        storage: How outputs are stored: "float32", "float16" or "uint8".
        device: Where. None: with the outputs, from the first batch on.
        fields: Tensors beside the table of outputs and the stamps.

    Raises:
        ValueError: If an argument is out of its range.
    """

    _table: Tensor
    _stamps: Tensor
    """The epoch in which each row was written."""

    def __init__(
        self,
        num_samples: int,
        num_classes: int,
        *,
        slots: int,
        storage: str,
        device: torch.device | str | None,
        fields: Mapping[str, Field] | None = None,
    ) -> None:
        self.num_samples = whole_number("num_samples", num_samples, 1, 2**62)
        self.num_classes = whole_number("num_classes", num_classes, 1)
        self.slots = slots
        self.storage = storage
        self._codec = codec_for(storage)
        self._fields = {
            "table": Field(self._codec.dtype, (self._codec.width(self.num_classes),), 0),
            "stamps": Field(torch.int32, (), NEVER),
            **(fields or {}),
        }
        if self.nbytes > LARGEST:
            raise ValueError(
                f"num_samples={num_samples} with num_classes={num_classes} would take "
                f"{self.nbytes / 2**40:,.0f} TiB: give the length of the training set"
            )
        self._follows = device is None
        self.device: torch.device | None = None
        """Where the tensors are; None before the first batch."""
        self._now = (0, 0, NEVER, NEVER, 0)
        """First row to write, first row to read, epoch now, epoch to read, calls so far. `_clock`
        is its copy on the device, where the calls are counted."""
        self._pending: tuple[Tensor, WriteBehind] | None = None
        self._claims: Tensor | None = None
        """With several processes, in which order samples were written; see `merge_rows`."""
        if device is not None:
            self.place(torch.empty(0, device=device).device)  # "cuda" becomes "cuda:0"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        rows = self.slots * self.num_samples + 1
        return rows * sum(
            field.dtype.itemsize * torch.Size(field.shape).numel()
            for field in self._fields.values()
        )

    @torch.inference_mode(False)
    def place(self, device: torch.device) -> None:
        """Allocate the tensors, or move those that follow the outputs."""
        if self.device is not None and not self._follows:
            return
        rows = self.slots * self.num_samples + 1
        for name, field in self._fields.items():
            if self.device is None:
                shape = (rows, *field.shape)
                tensor = torch.full(shape, field.fill, dtype=field.dtype, device=device)
            else:
                tensor = getattr(self, f"_{name}").to(device)
            setattr(self, f"_{name}", tensor)
        self._clock = torch.tensor(self._now, dtype=torch.int64, device=device)
        if self._claims is not None:
            self._claims = self._claims.to(device)
        self.device = device

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, whose outputs are written."""
        raise NotImplementedError

    def begin(self, epoch: int, write: int, read: int, seen: int) -> None:
        """Begin an epoch.

        Args:
            epoch: Its number, the stamp of what is written.
            write: The slot to write.
            read: The slot to read.
            seen: The epoch whose rows count when read.
        """
        self.flush()
        again = epoch == self._now[2]  # then the calls are counted on
        self._now = (write * self.num_samples, read * self.num_samples, epoch, seen, 0)
        if self.device is not None:
            now = torch.tensor(self._now, device="cpu")
            self._clock[: 4 if again else 5].copy_(now[: 4 if again else 5])

    def written(self) -> int:
        """How many samples were written in this epoch; waits for the device."""
        self.flush()
        return 0 if self.device is None else int((self._slot("stamps") == self._now[2]).sum())

    def _slot(self, name: str) -> Tensor:
        """The rows that this epoch writes."""
        return getattr(self, f"_{name}")[self._now[0] : self._now[0] + self.num_samples]

    def flush(self) -> None:
        """Write the batch that is on its way to the host."""
        if self._pending is not None:
            (index, batch), self._pending = self._pending, None
            self._put(index, *batch.wait())

    def _put(self, index: Tensor, rows: Tensor, keep: Tensor) -> None:
        """Write a batch that is on the memory's device."""
        raise NotImplementedError

    # Several processes.

    def join(self, group: dist.ProcessGroup | None) -> None:
        """Keep the order of this process's writes from now on, for `merge`."""
        self._rank, self._size = world(group)
        if self._claims is None and self._size > 1:
            shape = (self.num_samples + 1,)
            self._claims = torch.zeros(shape, dtype=torch.int32, device=self.device or "cpu")

    @property
    def shared(self) -> bool:
        """Whether several processes have a part of the rows until they merge."""
        return self._claims is not None

    def _claim(self, index: Tensor) -> None:
        """Note that this process wrote these samples in this call."""
        if self._claims is not None:
            self._clock[4] += 1
            claim = self._clock[4] * self._size + self._rank
            self._claims.index_copy_(0, index, claim.to(torch.int32).expand(len(index)))

    def merge(self, group: dist.ProcessGroup | None) -> None:
        """Give every process what any process wrote in this epoch."""
        self.flush()
        if self._claims is None:
            raise RuntimeError(
                "the process group is younger than this epoch: call init_process_group before "
                "set_epoch"
            )
        if self.device is None:
            self.place(torch.device("cpu"))
        stamps = self._slot("stamps")
        tables = [self._slot(name) for name in self._fields if name != "stamps"]
        known = merge_rows(tables, self._claims[:-1], stamps == self._now[2], group)
        stamps.masked_fill_(known, self._now[2])
        self._claims.zero_()

    # The state.

    def state(self) -> dict[str, Tensor]:
        """The tensors without the last row, as (slots, num_samples, ...)."""
        self.flush()
        views = {}
        for name, field in self._fields.items():
            shape = (self.slots, self.num_samples, *field.shape)
            if self.device is None:  # nothing was written: one element, expanded
                empty = torch.full((), field.fill, dtype=field.dtype, device="cpu")
                views[name] = empty.expand(shape)
            else:
                views[name] = getattr(self, f"_{name}")[:-1].view(shape)
        return views

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy a checked state in place."""
        self.flush()
        if self.device is None:
            self.place(state["table"].device)
        for name, view in self.state().items():
            view.copy_(state[name])
        if self._claims is not None:
            self._claims.zero_()

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return self.__dict__
