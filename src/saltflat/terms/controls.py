"""Controls for an honest comparison: SAF's loss without SAF's references."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saltflat.core.registry import register
from saltflat.terms.base import Batch, TrajectoryTerm
from saltflat.terms.saf import SAF


@register("term", "saf_uniform", passes="1 + 1")
class Uniform(TrajectoryTerm):
    """SAF's loss toward the uniform distribution.

    Args:
        weight: See `SAF`.
        temperature: See `SAF`.
        start_epoch: See `SAF`.
        tau_squared: See `SAF`.
    """

    def __init__(
        self,
        *,
        weight: float = 0.3,
        temperature: float = 5.0,
        start_epoch: int = 5,
        tau_squared: bool = True,
    ) -> None:
        super().__init__(
            weight=weight, temperature=temperature, start_epoch=start_epoch, tau_squared=tau_squared
        )

    def reference(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Equal logits for every row."""
        return torch.zeros_like(outputs), torch.ones_like(outputs[:, 0], dtype=torch.bool)


@register("term", "saf_shuffled", passes="1 + 1")
class Shuffled(SAF):
    """SAF that compares a sample with what another one gave.

    Args:
        num_samples: See `SAF`.
        num_classes: See `SAF`.
        seed: Of the orders; each epoch draws its own.
        **settings: See `SAF`.
    """

    def __init__(
        self, num_samples: int, num_classes: int, *, seed: int = 0, **settings: Any
    ) -> None:
        super().__init__(num_samples, num_classes, **settings)
        self._seed = seed
        self._order = torch.arange(num_samples + 1, device="cpu")  # the last: out of range

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + epoch)
        order = torch.randperm(self.memory.num_samples, generator=generator)
        self._order[:-1] = order  # in place: a CUDA graph reads this tensor

    def reference(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The outputs of another sample, `lag` epochs ago."""
        assert batch.index is not None
        if self._order.device != batch.index.device:
            self._order = self._order.to(batch.index.device)
        return self.memory.read(self._order[batch.index], outputs.device)
