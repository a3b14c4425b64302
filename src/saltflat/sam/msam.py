"""MSAM: move against the momentum, before the one gradient is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.sam._algebra import norm
from saltflat.sam._wrapper import SharpnessAware
from saltflat.sam.asam import adaptive_direction


class MSAM(SharpnessAware):
    r"""Momentum-SAM.

    .. math:: \hat\epsilon = -\rho \, m / \|m\|, \qquad
        \theta \leftarrow \theta - \eta\, \mathrm{step}(\nabla L(\theta + \hat\epsilon))

    with m the base optimizer's momentum, so one pass a step. The sign is the paper's: the step
    before went that way too far already, so that further on the loss rises. The first step, which
    has no momentum yet, is a plain one. In the two-call form `first_step` comes before the forward
    pass.

    Args:
        base_optimizer: An optimizer with momentum: SGD with `momentum`, or one of Adam's kin.
        rho: How far to move. The authors use 2.2 to 3 on CIFAR-100, more than SAM's because the
            momentum of many batches is a smoother direction.
        adaptive: Move along T^2 m / |T m| instead, T as in `ASAM`.
        eta: Added to T.
        model: Not needed, and accepted as all the family does: there is no second pass.

    Raises:
        ValueError: If the base optimizer has no momentum.

    References:
        Becker et al., Momentum-SAM: Sharpness Aware Minimization without Computational Overhead,
        2024.
    """

    _BUFFERS = ("momentum_buffer", "exp_avg")

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        rho: float = 3.0,
        adaptive: bool = False,
        eta: float = 0.01,
        model: nn.Module | None = None,
    ) -> None:
        if not eta >= 0:
            raise ValueError(f"eta must be 0 or more, got {eta}")
        self.adaptive = adaptive
        self.eta = eta
        super().__init__(base_optimizer, rho=rho, model=model)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]
        """Take one step with one call of the closure.

        Returns:
            Its loss, at the weights that it moved to.
        """
        if self._base_steps:
            return super().step()
        closure = self._required(closure)
        with self._or_cancel():
            self.first_step()
            loss = self._pass(closure)
            self.second_step()
        return loss

    @torch.no_grad()
    def first_step(self) -> bool:
        """Move, before the forward pass.

        Returns:
            True: the one pass is still to come.

        Raises:
            RuntimeError: If it is called twice, or the base optimizer's momentum is not found.
        """
        if self._first_step_done:
            raise RuntimeError("first_step was called twice: finish the step with second_step")
        momenta = {p: self._momentum(p) for p in self._parameters()}
        moved = {p: m for p, m in momenta.items() if m is not None and p.requires_grad}
        if self.state and not moved:
            raise RuntimeError(
                f"{type(self.base_optimizer).__name__} keeps its momentum under none of the names "
                f"{', '.join(self._BUFFERS)}: MSAM cannot find it"
            )
        if moved:
            self._climb(list(moved), list(moved.values()))
        self._first_step_done = True
        return True

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        settings = {**self.defaults, **group}
        if "betas" not in settings and not settings.get("momentum"):
            raise ValueError(
                "MSAM moves along the momentum, and the base optimizer has none: give it "
                "momentum=0.9, say"
            )

    def _momentum(self, parameter: Tensor) -> Tensor | None:
        state = self.state.get(parameter, {})
        return next((state[name] for name in self._BUFFERS if state.get(name) is not None), None)

    def _directions(
        self, parameters: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        if self.adaptive:
            directions, length = adaptive_direction(parameters, gradients, self.eta)
        else:
            directions, length = gradients, norm(gradients)
        return directions, -1 / (length + 1e-12)
