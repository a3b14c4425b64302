"""The epochs of a term: what a term counts in each, and what it saves, loads and merges.

Nothing here runs in a step. See `saltflat.terms.base` for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from saltflat.core.checks import whole_number
from saltflat.core.distributed import Group, world
from saltflat.memory.merge import all_reduce, require_agreement
from saltflat.memory.state import PlainState
from saltflat.memory.table import SampleMemory
from saltflat.terms.misuse import Misuse


class EpochState(PlainState):
    """The epoch, the counters and the memory of a term.

    Args:
        start_epoch: The first epoch, counted from 0, in which the loss is added.
        memory: A memory of outputs by sample, or None.
        process_group: The processes that train together. None: all.
    """

    lag = 0
    """How many epochs ago a reference was recorded."""

    def __init__(
        self,
        start_epoch: int,
        memory: SampleMemory | None,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.start_epoch = whole_number("start_epoch", start_epoch)
        self.memory = memory
        self.epoch: int | None = None
        self.active = False
        """Whether the loss is added in this epoch."""
        # Whether an epoch was set. `forward` asks this: torch.compile would recompile for every
        # number of `epoch`.
        self._begun = False
        self._since = 0  # the first epoch that was set
        # Counts of rows: all, finite, with a reference, of a known sample. `_counted` has those of
        # this process since the last sync. `_counts` has those of all processes in this epoch, and
        # last the rows of earlier epochs that were not finite.
        self._counted = torch.zeros(4, dtype=torch.int64, device="cpu")
        self._counts = torch.zeros(5, dtype=torch.int64, device="cpu")
        self._steps = 0  # since set_epoch
        self._misuse = Misuse(type(self).__name__)
        self._group = Group(process_group)

    @property
    def first_epoch(self) -> int:
        """The first epoch that can have a loss."""
        return max(self.start_epoch, self.lag)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; call it on every process, at the start of every epoch.

        Args:
            epoch: Counted from 0. The same number again, as after a resume, changes nothing.

        Raises:
            ValueError: If it is not a whole number from 0, or earlier than the last one; or if
                indices on a GPU were out of range since the last call.
            RuntimeError: If the processes differ, or one does not call.
        """
        number = whole_number("epoch", epoch)
        if self.epoch is not None and number < self.epoch:
            raise ValueError(
                f"epoch {number} comes after epoch {self.epoch}: to go back, load an earlier "
                "state_dict; for a new run, build a new object"
            )
        self._agree(f"epoch {self.epoch} to epoch {number}")
        if self.epoch is None:
            self._since = number
        elif number > self.epoch:
            self._merge()
            self._end_epoch(self.epoch)
        self._begin(number)

    def _begin(self, epoch: int) -> None:
        self.epoch, self.active, self._steps = epoch, epoch >= self.start_epoch, 0
        self._begun = True
        if self.memory is not None:
            self.memory.join(self._group.it)
            self.memory.begin_epoch(epoch)

    def _end_epoch(self, epoch: int) -> None:
        """Notice misuse in what the epoch counted, and reset the counters."""
        rows, finite, referenced, known, before = self._counts.tolist()
        self._counts.copy_(torch.tensor([0, 0, 0, 0, before + rows - finite]))
        if rows and not referenced and epoch >= max(self.start_epoch, self._since + self.lag):
            self._misuse.no_reference(epoch)
        if self.memory is None:
            return
        written, visits = self.memory.written(), known - (rows - finite)
        if written < 0.9 * min(visits, self.memory.num_samples):
            self._misuse.few_samples(epoch, visits, written)
        if known < rows:
            raise ValueError(
                f"index was outside 0..{self.memory.num_samples - 1} in {rows - known} rows since "
                "the last set_epoch; they were neither read nor written. num_samples must be the "
                "length of the whole training set"
            )

    def sync(self) -> None:
        """Make the state whole; call it on every process before each checkpoint.

        It changes nothing of the training. On one process it only reads the counters.

        Raises:
            RuntimeError: If the processes differ in epoch or settings, or one does not call.
        """
        self._agree(f"sync in epoch {self.epoch}")
        self._merge()

    def _agree(self, what: str) -> None:
        """Check that every process does this, with the same settings."""
        if world(self._group.it)[1] > 1:
            settings = f"{type(self).__name__}({self.extra_repr()})"
            require_agreement(f"{what}, {settings}", self._group.it)

    def _merge(self) -> None:
        group, counted = self._group.it, self._counted.cpu()
        if world(group)[1] > 1:
            all_reduce(counted, dist.ReduceOp.SUM, group)
            if self.memory is not None and self.epoch is not None:
                self.memory.merge(group)
        self._counts[:4] += counted
        self._counted.zero_()

    @property
    def nonfinite_rows(self) -> int:
        """Rows with NaN or infinite outputs so far; reading it waits for the device.

        With several processes: of all up to the last `sync` or epoch, and of this one since.
        """
        rows, finite, *_, before = self.plain_state()["counts"].tolist()
        return int(before + rows - finite)

    def plain_state(self) -> dict[str, Tensor]:
        """The epoch, the counters and the memory."""
        epoch = -1 if self.epoch is None else self.epoch
        counts = self._counts.clone()
        counts[:4] += self._counted.cpu()
        memory = {} if self.memory is None else self.memory.state()
        return {
            "epochs": torch.tensor([epoch, self._since], device="cpu"),
            "counts": counts,
            **{f"memory.{name}": tensor for name, tensor in memory.items()},
        }

    def take_plain_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state."""
        self._counts.copy_(state["counts"])
        self._counted.zero_()
        epoch, self._since = state["epochs"].tolist()
        if self.memory is not None:
            tables = {n.removeprefix("memory."): t for n, t in state.items() if "memory." in n}
            self.memory.load(tables)
        if epoch >= 0:
            self._begin(epoch)
        else:
            self.epoch, self.active, self._begun = None, False, False

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.memory is not None and self.memory.shared and self._counted.any():
            raise RuntimeError(
                "this process has rows that the others lack: call sync() on every process before "
                "state_dict()"
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)
