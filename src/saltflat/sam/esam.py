"""ESAM: SAM on part of the weights and part of the batch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.core import cuda_graph
from saltflat.core.cuda_graph import random_state, set_random_state
from saltflat.sam.sam import SAM


class ESAM(SAM):
    r"""Efficient Sharpness-Aware Minimization.

    (a) Each parameter tensor joins the perturbation with probability beta, and e is multiplied by
    1 / beta. (b) The second pass is over the gamma share of the batch whose loss rose most.

    A step is a pass over the batch, a forward pass over it where the climb ended (none if gamma is
    1), and a pass over the share.

    Args:
        base_optimizer: The optimizer that takes the steps.
        rho: How far to climb.
        beta: 0.6 for ResNets, 0.5 otherwise.
        gamma: 0.5.
        seed: Of the choice of tensors; the same on every rank.
        interval: Climb in every `interval`-th step only; the others are plain steps.
        model: The model, so that its BatchNorm statistics are those of the first pass alone.

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
            if not 0 < share <= 1:
                raise ValueError(f"{name} must be within (0, 1], got {share}")
        self.beta = beta
        self.gamma = gamma
        self.seed = seed
        self._losses: Tensor | None = None
        self._joins: Tensor | None = None
        """In a captured step: 1 for a parameter that joins, 0 for one that does not."""
        super().__init__(base_optimizer, rho=rho, interval=interval, model=model)

    @torch.no_grad()
    def step(self, closure: Callable[[Tensor | None], Tensor] | None = None) -> Tensor:  # type: ignore[override]
        """Take one step.

        Args:
            closure: Takes the rows of the batch to use (a tensor of indices; None: all), runs
                forward, and returns the loss of each of them. It zeroes nothing and calls no
                backward.

        Returns:
            The mean loss of the whole batch, at the weights themselves.

        Raises:
            RuntimeError: Without a closure, or if it does not return a loss for each row; the
                weights are then as they were.
        """
        if self._base_steps:
            return super().step()
        if closure is None:
            raise RuntimeError(
                "ESAM.step needs a closure that takes the rows to use (None: all) and returns the "
                "loss of each; or use first_step, select and second_step"
            )
        before = random_state(self._parameters())
        losses = self._backward(closure, None)
        with self._or_cancel():
            if self.first_step(losses):
                with self._second_pass(before):
                    rows = None
                    if self.gamma < 1:
                        rows = self.select(closure(None))
                        set_random_state(before)
                    self._backward(closure, rows)
            self.second_step()
        return losses.mean()

    @torch.no_grad()
    def first_step(self, losses: Tensor | None = None) -> bool:
        """Climb, from the gradients of the first pass, and remember each row's loss in it.

        Args:
            losses: The loss of each row of the batch; needed by `select`.
        """
        self._losses = None if losses is None else losses.detach()
        return super().first_step()

    def select(self, losses: Tensor) -> Tensor:
        """The gamma share of the rows whose loss rose most, given the losses after the climb."""
        if self._losses is None or losses.shape != self._losses.shape:
            raise RuntimeError("select needs the losses of the same rows in first_step(losses)")
        count = math.ceil(self.gamma * len(losses) - 1e-9)  # 0.55 * 100 is 55, and a bit
        return (losses - self._losses).topk(count).indices.sort().values

    def _backward(self, closure: Callable[[Tensor | None], Tensor], rows: Tensor | None) -> Tensor:
        """A pass over some rows; their losses."""
        self.zero_grad()
        with torch.enable_grad():
            losses = closure(rows)
            expected = None if rows is None else len(rows)
            if not isinstance(losses, Tensor) or losses.dim() != 1 or not losses.requires_grad:
                raise RuntimeError(
                    "ESAM's closure must return the loss of each row, e.g. of reduction='none', "
                    "as a vector that has a gradient"
                )
            if expected not in (None, len(losses)):
                raise RuntimeError(
                    f"ESAM's closure was asked for {expected} rows and returned {len(losses)} "
                    "losses: it must use the rows it is given"
                )
            losses.mean().backward()
        return losses.detach()

    def before_replay(self) -> None:
        """Choose the tensors that join the step a CUDA graph is about to repeat, and count it."""
        if self._joins is not None:
            joining = self._joining()
            chosen = [float(id(p) in joining) for p in self._parameters()]
            self._joins.copy_(torch.tensor(chosen, device="cpu"))
        super().before_replay()

    def _joining(self) -> set[int]:
        """Which parameters join this step's perturbation, by id; the same on every rank."""
        parameters = [p for p in self._parameters() if p.requires_grad]
        if self.beta == 1:
            return {id(p) for p in parameters}
        choice = random.Random(f"{self.seed} {self.steps}")
        joining = {id(p) for p in parameters if choice.random() < self.beta}
        return joining or {id(choice.choice(parameters))}

    def _moved(self) -> tuple[list[Tensor], list[Tensor]]:
        if cuda_graph.capturing():
            return super()._moved()
        if self._joins is None:
            everyone = self._parameters()
            self._joins = torch.zeros(len(everyone), device=everyone[0].device)
        joining = self._joining()
        pairs = [(p, g) for p, g in zip(*super()._moved(), strict=True) if id(p) in joining]
        return [p for p, _ in pairs], [g for _, g in pairs]

    def _directions(
        self, parameters: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        if not cuda_graph.capturing() or self.beta == 1:
            return super()._directions(parameters, gradients)
        if self._joins is None:
            raise RuntimeError("take a step of ESAM before one is captured")
        # All of them move, those that were not chosen by nothing.
        join_of = dict(zip(self._parameters(), self._joins.unbind(), strict=True))
        chosen = torch._foreach_mul(gradients, [join_of[p] for p in parameters])
        return super()._directions(parameters, list(chosen))

    def _rho(self, group: dict[str, Any]) -> float | Tensor:
        return super()._rho(group) / self.beta
