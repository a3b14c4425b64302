"""A module that is told which epoch it is."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn

_LAST = torch.iinfo(torch.int32).max


class Clocked(nn.Module):
    """Knows the epoch from `set_epoch`, and keeps it in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; the same one again is fine, as after a resume.

        Args:
            epoch: Counted from 0.

        Raises:
            ValueError: If it is not a whole number from 0, or earlier than the last one.
        """
        try:
            number = -1 if isinstance(epoch, bool) else operator.index(epoch)
        except TypeError:
            number = -1
        if not 0 <= number <= _LAST:
            raise ValueError(f"epoch must be a whole number from 0, got {epoch!r}")
        if self.epoch is not None and number < self.epoch:
            raise ValueError(
                f"epoch {number} comes after epoch {self.epoch}: to go back, load an earlier "
                "state_dict; for a new run, build a new object"
            )
        self._begin(number)

    def _begin(self, epoch: int | None) -> None:
        """Take over an epoch that is known to be good; None: as if none had begun."""
        self.epoch = epoch

    def get_extra_state(self) -> Tensor:
        """The epoch, as a tensor for the sake of safetensors; -1 before the first."""
        return torch.tensor(-1 if self.epoch is None else self.epoch, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Continue in the epoch of the loaded state."""
        epoch = int(state)
        self._begin(None if epoch < 0 else epoch)
