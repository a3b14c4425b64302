"""MSAM: climb against the momentum, before the only gradient is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.core.registry import register
from saltflat.sam.asam import adaptive_direction
from saltflat.sam.base import Gradients, SharpnessAware, check, norm


@register("optimizer", "msam", passes="1 + 1", paper="Becker et al., 2024")
class MSAM(SharpnessAware):
    r"""Momentum-SAM.

    .. math:: \hat\epsilon(w) = -\rho \, m / \|m\|, \qquad
        w \leftarrow w - \eta\, \mathrm{step}(\nabla L(w + \hat\epsilon(w)))

    m is the base optimizer's momentum, so a step takes one pass. The sign is the paper's: the last
    step already went too far along m, so the loss rises that way. The first step has no momentum
    and is a plain one. In the two-call form, call `first_step` before the forward pass.

    Args:
        base_optimizer: An optimizer with momentum: SGD with `momentum`, or one of Adam's family.
        rho: How far to climb. The authors use 2.2 to 3 on CIFAR-100. That is more than SAM's rho,
            because the momentum of many batches is a smoother direction.
        adaptive: Climb along T^2 m / |T m| instead, with T as in `ASAM`.
        eta: Added to T.
        model: Accepted as in the whole family. It has no effect: there is no second pass.

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
        check("eta", eta)
        self.adaptive = adaptive
        self.eta = eta
        super().__init__(base_optimizer, rho=rho, model=model)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        settings = {**self.defaults, **group}
        if "betas" not in settings and not settings.get("momentum"):
            raise ValueError(
                f"momentum must be above 0, got {settings.get('momentum')!r}: MSAM climbs along "
                "the base optimizer's momentum; give it momentum=0.9, say"
            )

    def _step(self, closure: Callable[..., Tensor]) -> Tensor:
        self.first_step()  # climb to w + e(w)
        loss = self._pass(closure)  # the gradient there
        self._update(self._restore())  # return to w; the base optimizer steps
        return loss

    def _moved(self) -> Gradients:
        """The parameters that have a momentum, and it in the place of their gradients."""
        momenta = {p: self._momentum(p) for p in self._parameters() if p.requires_grad}
        moved = {p: m for p, m in momenta.items() if m is not None}
        if self.state and not moved:
            raise RuntimeError(
                f"{type(self.base_optimizer).__name__} keeps its momentum under none of the names "
                f"{', '.join(self._BUFFERS)}: MSAM cannot find it"
            )
        return list(moved), list(moved.values())

    def _momentum(self, parameter: Tensor) -> Tensor | None:
        state = self.state.get(parameter, {})
        return next((state[name] for name in self._BUFFERS if state.get(name) is not None), None)

    def _directions(
        self, parameters: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        directions, length = gradients, norm(gradients)
        if self.adaptive:
            directions, length = adaptive_direction(parameters, gradients, self.eta)
        return directions, -(length + 1e-12)
