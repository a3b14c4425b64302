"""What SAF and MESA share: a trajectory loss with a weight, a start and a clock."""

from __future__ import annotations

from functools import reduce
from math import inf, isfinite

import torch
from torch import Tensor, nn

from saltflat.trajectory import trajectory_loss


class TrajectoryTerm(nn.Module):
    """A term to add to the loss: weight * trajectory_loss from `start_epoch` on.

    The clock is the caller's: `set_epoch` at the start of every epoch, as DistributedSampler has.

    Raises:
        ValueError: If a hyperparameter is out of its range.
    """

    def __init__(
        self, *, weight: float, temperature: float, start_epoch: int, tau_squared: bool
    ) -> None:
        super().__init__()
        if not (isfinite(weight) and weight >= 0):
            raise ValueError(f"weight must be 0 or more, got {weight}")
        if not (isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature must be positive, got {temperature}")
        if start_epoch < 0:
            raise ValueError(f"start_epoch counts from 0, got {start_epoch}")
        self.weight = weight
        self.temperature = temperature
        self.start_epoch = start_epoch
        self.tau_squared = tau_squared
        self.epoch: int | None = None
        # What a step looks at; an int that changed every epoch would recompile a compiled step.
        self._started: bool | None = None
        self.register_buffer("_nonfinite", torch.zeros((), dtype=torch.int64))
        self._nonfinite: Tensor

    @property
    def nonfinite_rows(self) -> int:
        """How many rows had NaN or infinite outputs so far; reading it waits for the device."""
        return int(self._nonfinite)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; the same one again is fine, as after a resume.

        Args:
            epoch: Counted from 0.

        Raises:
            ValueError: If it is not a whole number from 0, or earlier than the last one.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch must be a whole number from 0, got {epoch!r}")
        if self.epoch is not None and epoch < self.epoch:
            raise ValueError(
                f"epoch {epoch} comes after epoch {self.epoch}: to go back, load an earlier "
                "state_dict; for a new run, build a new object"
            )
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._started = epoch >= self.start_epoch

    def _running(self) -> bool:
        """Whether the loss has started.

        Raises:
            RuntimeError: If no epoch has begun.
        """
        if self._started is None:
            raise RuntimeError("call set_epoch(epoch) at the start of every epoch, before forward")
        return self._started

    def _finite_rows(self, *outputs: Tensor) -> Tensor:
        """Which rows are finite in all the outputs; the others are counted."""
        # The greatest magnitude of a row with NaN is NaN, which is not below infinity.
        finite = reduce(
            torch.logical_and,
            [torch.linalg.vector_norm(rows.detach(), inf, dim=-1) < inf for rows in outputs],
        )
        if self._nonfinite.device != finite.device:
            self._nonfinite = self._nonfinite.to(finite.device)
        self._nonfinite += (~finite).sum()
        return finite

    def _loss(self, logits: Tensor, reference: Tensor, valid: Tensor) -> Tensor:
        loss = trajectory_loss(
            logits,
            reference,
            temperature=self.temperature,
            tau_squared=self.tau_squared,
            valid=valid,
        )
        return self.weight * loss

    def _no_loss(self, logits: Tensor) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return torch.zeros((), dtype=dtype, device=logits.device)

    def get_extra_state(self) -> Tensor:
        """The epoch, as a tensor for the sake of safetensors; -1 before the first."""
        return torch.tensor(-1 if self.epoch is None else self.epoch)

    def set_extra_state(self, state: Tensor) -> None:
        """Continue in the epoch of the loaded state."""
        if (epoch := int(state)) >= 0:
            self._begin(epoch)
        else:
            self.epoch = self._started = None

    def extra_repr(self) -> str:
        return (
            f"weight={self.weight}, temperature={self.temperature}, "
            f"start_epoch={self.start_epoch}, tau_squared={self.tau_squared}"
        )
