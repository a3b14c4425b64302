"""What SAF and MESA share: a trajectory loss with a weight and a start."""

from __future__ import annotations

from functools import reduce
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from saltflat._clock import Clocked
from saltflat._launch import has_triton
from saltflat._sources import Ring, Staged
from saltflat.trajectory import trajectory_loss

ONE_LOGIT = (
    "the probability of a single class is always 1, and the loss 0. Where one logit z stands for "
    "two classes, let the model return torch.cat([torch.zeros_like(z), z], -1)"
)
"""Why one class is refused."""


class TrajectoryTerm(Clocked):
    """A term to add to the loss: weight * trajectory_loss from `start_epoch` on.

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
        if not isinstance(start_epoch, int) or start_epoch < 0:
            raise ValueError(f"start_epoch must be a whole number from 0, got {start_epoch}")
        self.weight = weight
        self.temperature = temperature
        self.start_epoch = start_epoch
        self.tau_squared = tau_squared
        # What a step looks at; an int that changed every epoch would recompile a compiled step.
        self._started: bool | None = None
        self.register_buffer("_nonfinite", torch.zeros((), dtype=torch.int64, device="cpu"))
        self._nonfinite: Tensor
        self.register_load_state_dict_pre_hook(_check_loaded)

    @property
    def nonfinite_rows(self) -> int:
        """Rows of this process with NaN or infinite outputs; reading it waits for the device."""
        return int(self._nonfinite)

    @property
    def first_epoch(self) -> int:
        """The first epoch that can have a loss."""
        return self.start_epoch

    @property
    def started(self) -> bool:
        """Whether the loss is added in this epoch."""
        return bool(self._started)

    @property
    def pulls(self) -> bool:
        """Whether the step to come has the loss."""
        return self.started

    @property
    def _factor(self) -> float:
        """What the trajectory loss of a step is multiplied by."""
        return self.weight

    def whole_state_dict(self) -> dict[str, Any]:
        """The state of all processes as one; all must ask for it, and rank 0 gets it."""
        return self.state_dict()

    def _begin(self, epoch: int | None) -> None:
        super()._begin(epoch)
        self._started = None if epoch is None else epoch >= self.start_epoch

    def _check(self, logits: Tensor) -> bool:
        """Whether the loss has started.

        Raises:
            RuntimeError: If no epoch has begun.
            ValueError: If the logits are not floating-point numbers.
        """
        if self._started is None:
            raise RuntimeError("call set_epoch(epoch) at the start of every epoch, before forward")
        if not logits.is_floating_point():
            raise ValueError(f"logits must be floating-point numbers, got {logits.dtype}")
        return self._started

    def _finite_rows(self, *outputs: Tensor) -> Tensor:
        """Which rows are finite, in float32, in all the outputs; the others are counted."""
        # The greatest magnitude of a row with NaN is NaN, which is not below infinity.
        finite = reduce(
            torch.logical_and,
            [
                torch.linalg.vector_norm(rows.detach(), inf, dim=-1).to(torch.float32) < inf
                for rows in outputs
            ],
        )
        if self._nonfinite.device != finite.device:
            self._nonfinite = self._nonfinite.to(finite.device)
        self._nonfinite += (~finite).sum()
        return finite

    def _fused_loss(
        self, logits: Tensor, source: Ring | Staged, *, started: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The weighted loss and the finite rows, by two kernels; the others are counted."""
        from saltflat import _fused

        if self._nonfinite.device != logits.device:
            self._nonfinite = self._nonfinite.to(logits.device)
        return _fused.weighted_loss(
            logits,
            source,
            self._nonfinite,
            weight=self._factor,
            temperature=self.temperature,
            tau_squared=self.tau_squared,
            started=started,
        )

    def _loss(self, logits: Tensor, reference: Tensor, valid: Tensor) -> Tensor:
        loss = trajectory_loss(
            logits,
            reference,
            temperature=self.temperature,
            tau_squared=self.tau_squared,
            valid=valid,
        )
        return self._factor * loss

    def _no_loss(self, logits: Tensor) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return torch.zeros((), dtype=dtype, device=logits.device)

    def _check_loaded(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Raise before anything is loaded, where torch would load what fits and then raise."""
        for name, own in self.state_dict().items():
            loaded = state_dict.get(prefix + name)
            if loaded is not None and (loaded.shape, loaded.dtype) != (own.shape, own.dtype):
                raise RuntimeError(
                    f"{prefix}{name} of the loaded state is {loaded.dtype} of shape "
                    f"{tuple(loaded.shape)}, not {own.dtype} of shape {tuple(own.shape)}: it "
                    f"belongs to a {type(self).__name__} with other settings. Nothing was loaded"
                )

    def extra_repr(self) -> str:
        return (
            f"weight={self.weight}, temperature={self.temperature}, "
            f"start_epoch={self.start_epoch}, tau_squared={self.tau_squared}"
        )


def can_fuse(logits: Tensor) -> bool:
    """Whether the kernels of `saltflat._fused` can take these logits."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if not (has_triton() and logits.dim() == 2):
        return False
    from saltflat import _fused

    return _fused.serves(logits)


def _check_loaded(term: TrajectoryTerm, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    term._check_loaded(state_dict, prefix)
