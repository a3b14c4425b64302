"""ESAM: SAM on part of the weights and part of the batch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.core.cuda_graph import random_state, set_random_state
from saltflat.core.registry import register
from saltflat.sam.base import Gradients, check
from saltflat.sam.sam import SAM


@register("optimizer", "esam", passes="2.5 + 1.5", paper="Du et al., ICLR 2022")
class ESAM(SAM):
    r"""Efficient Sharpness-Aware Minimization.

    (a) Each parameter tensor joins the climb with probability beta; e(w) is multiplied by 1 / beta.
    (b) The second pass uses the gamma share of the batch whose loss rose most.

    A step is a pass over the batch, a forward pass over it at w + e(w) (none if gamma is 1), and a
    pass over the share. It chooses in Python, so it cannot be captured in a CUDA graph.

    `step` calls its closure with the rows of the batch to use: a tensor of indices, or None for
    all. The closure runs forward and returns the loss of each row. It neither zeroes gradients nor
    calls backward. `step` returns the mean loss of the whole batch at w.

    Args:
        base_optimizer: The optimizer that takes the steps.
        rho: How far to climb.
        beta: 0.6 for ResNets, 0.5 otherwise.
        gamma: 0.5.
        seed: Of the choice of tensors; the same on every rank.
        interval: Climb in every `interval`-th step; the others are plain steps.
        model: The model, so that the second pass leaves its BatchNorm statistics alone.

    References:
        Du et al., Efficient Sharpness-aware Minimization for Improved Training of Neural Networks,
        ICLR 2022.
    """

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        rho: float = 0.05,
        beta: float = 0.6,
        gamma: float = 0.5,
        seed: int = 0,
        interval: int = 1,
        model: nn.Module | None = None,
    ) -> None:
        for name, share in {"beta": beta, "gamma": gamma}.items():
            check(name, share, "within (0, 1]", lambda v: 0 < v <= 1)
        self.beta = beta
        self.gamma = gamma
        self.seed = seed
        self._losses: Tensor | None = None
        super().__init__(base_optimizer, rho=rho, interval=interval, model=model)

    def graph_key(self) -> bool:
        """Refuse a CUDA graph.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("ESAM chooses tensors in Python: run its step without a GraphedStep")

    def _step(self, closure: Callable[..., Tensor]) -> Tensor:
        before = random_state(self._parameters())
        losses = self._rows_pass(closure, None)  # L(w) of each row, and g
        if self.first_step(losses):  # climb to w + e(w)
            with self._second_pass(before):
                rows = None
                if self.gamma < 1:
                    rows = self.select(closure(None))  # by L(w + e(w)) - L(w)
                    set_random_state(before)
                self._rows_pass(closure, rows)
        self._update(self._restore())
        return losses.mean()

    @torch.no_grad()
    def first_step(self, losses: Tensor | None = None) -> bool:
        """Climb along the gradients of the first pass, and drop them.

        Args:
            losses: The loss of each row of the batch, which `select` needs.

        Returns:
            Whether a second pass is needed.
        """
        self._losses = None if losses is None else losses.detach()
        return super().first_step()

    def select(self, losses: Tensor) -> Tensor:
        """The gamma share of the rows whose loss rose most, given the losses after the climb."""
        if self._losses is None or losses.shape != self._losses.shape:
            raise RuntimeError("select needs the losses of the same rows in first_step(losses)")
        count = math.ceil(self.gamma * len(losses) - 1e-9)  # 0.55 * 100 is 55, and a bit
        return (losses - self._losses).topk(count).indices.sort().values

    def _rows_pass(self, closure: Callable[..., Tensor], rows: Tensor | None) -> Tensor:
        """A pass over some rows; returns their losses."""

        def mean_backward() -> Tensor:
            losses = closure(rows)
            if not isinstance(losses, Tensor) or losses.dim() != 1 or not losses.requires_grad:
                raise RuntimeError(
                    "ESAM's closure must return the loss of each row, e.g. of reduction='none', "
                    "as a vector that has a gradient"
                )
            if rows is not None and len(losses) != len(rows):
                raise RuntimeError(
                    f"ESAM's closure was asked for {len(rows)} rows and returned {len(losses)} "
                    "losses: it must use the rows that it is given"
                )
            losses.mean().backward()
            return losses.detach()

        return self._pass(mean_backward)

    def joining(self) -> set[int]:
        """The ids of the parameters that join the next climb; the same on every rank."""
        parameters = [p for p in self._parameters() if p.requires_grad]
        choice = random.Random(f"{self.seed} {self.steps}")
        joining = {id(p) for p in parameters if choice.random() < self.beta}
        return joining or {id(choice.choice(parameters))}

    def _moved(self) -> Gradients:
        joining = self.joining()
        pairs = [(p, g) for p, g in zip(*super()._moved(), strict=True) if id(p) in joining]
        return [p for p, _ in pairs], [g for _, g in pairs]

    def _restore(self) -> Gradients:
        self._losses = None
        return super()._restore()

    def _rho(self, group: dict[str, Any]) -> float | Tensor:
        return super()._rho(group) / self.beta
