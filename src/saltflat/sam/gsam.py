"""GSAM: SAM that also lowers the loss at the weights themselves."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.core.distributed import local, sharded, summed
from saltflat.core.registry import register
from saltflat.sam.base import Gradients, check, norm, scaled
from saltflat.sam.sam import SAM


@register("optimizer", "gsam", passes="2 + 2", paper="Zhuang et al., ICLR 2022")
class GSAM(SAM):
    r"""Surrogate Gap Guided Sharpness-Aware Minimization.

    .. math:: g_\perp = g - \frac{\langle g, g_{adv} \rangle}{\|g_{adv}\|^2} g_{adv}, \qquad
        w \leftarrow w - \eta (g_{adv} - \alpha g_\perp)

    g is the gradient at the weights, g_adv the one at SAM's w + e(w). rho follows the learning
    rate, from `rho` at `lr_max` to `rho_min` at `lr_min`. A step takes two passes.

    Args:
        base_optimizer: The optimizer that takes the steps, and whose learning rate is followed.
        rho: 0.04 for ResNet-50 and ResNet-101 on ImageNet, 0.6 for ViT-S/32.
        rho_min: 0.02 for these ResNets, 0 for ViT-S/32.
        alpha: 0.01 for these ResNets, 0.4 for ViT-S/32.
        lr_max: The learning rate at which rho is `rho`. None: the group's "max_lr" or
            "initial_lr", which schedules note there, or else the optimizer's own.
        lr_min: The learning rate at which rho is `rho_min`.
        interval: Climb in every `interval`-th step; the others are plain steps.
        model: The model, so that the second pass leaves its BatchNorm statistics alone.

    References:
        Zhuang et al., Surrogate Gap Minimization Improves Sharpness-Aware Training, ICLR 2022.
    """

    _keeps_gradients = True

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        rho: float = 0.04,
        rho_min: float = 0.02,
        alpha: float = 0.01,
        lr_max: float | None = None,
        lr_min: float = 0.0,
        interval: int = 1,
        model: nn.Module | None = None,
    ) -> None:
        check("alpha", alpha)
        check("rho", rho)
        check("rho_min", rho_min, f"within [0, rho={rho}]", lambda v: 0 <= v <= rho)
        check("lr_min", lr_min, "a number", lambda v: -inf < v < inf)
        self.alpha = alpha
        self.rho_min = rho_min
        self.lr_max = lr_max
        self.lr_min = lr_min
        self._first_lr: float | None = None
        super().__init__(base_optimizer, rho=rho, interval=interval, model=model)
        self._first_lr = float(self.defaults["lr"])  # a schedule may change a tensor in place

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if "lr" in group:
            wanted = f"above lr_min={self.lr_min}: give the schedule's highest learning rate"
            check("lr_max", self._peak(group), wanted, lambda v: v > self.lr_min)

    def _peak(self, group: dict[str, Any]) -> float:
        """The highest learning rate: the one given, or a schedule's, or the first."""
        if self.lr_max is not None:
            return self.lr_max
        first = self.defaults["lr"] if self._first_lr is None else self._first_lr
        return group.get("max_lr", group.get("initial_lr", first))

    def _method_state(self) -> dict[str, Any]:
        return {**super()._method_state(), "first_lr": self._first_lr}

    def _load_method_state(self, state: dict[str, Any]) -> None:
        super()._load_method_state(state)
        self._first_lr = state.get("first_lr", self._first_lr)

    def _rho(self, group: dict[str, Any]) -> float | Tensor:
        """rho_min + (rho - rho_min) * (lr - lr_min) / (lr_max - lr_min), clipped to the two."""
        share = (group["lr"] - self.lr_min) / (self._peak(group) - self.lr_min)
        share = share.clamp(0, 1) if isinstance(share, Tensor) else min(max(share, 0.0), 1.0)
        rho = group.get("rho", self.rho)
        lowest = min(self.rho_min, rho)
        return lowest + (rho - lowest) * share

    def _combine(self, first: Gradients, scaler: torch.amp.GradScaler | None) -> None:
        pairs = [(p.grad, g) for p, g in zip(*first, strict=True) if p.grad is not None]
        if self.alpha == 0 or not pairs:
            return
        g_adv, g = [list(part) for part in zip(*pairs, strict=True)]
        if scaler is not None and scaler.is_enabled():
            with suppress(RuntimeError):  # unscaled before, for clipping
                scaler.unscale_(self)
            torch._foreach_div_(local(g), scaler.get_scale())
        g_perp, _ = orthogonal(g, g_adv)
        torch._foreach_sub_(local(g_adv), g_perp, alpha=self.alpha)


def orthogonal(left: list[Tensor], right: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The part of `left` that is orthogonal to `right`, and the length of the other part.

    Each list is one long vector. Of sharded tensors the part is this rank's.
    """
    length = norm(right)
    sides = [[part.to(length.dtype) for part in local(side)] for side in (left, right)]
    products = torch._foreach_mul(*sides)
    inner = torch.stack([product.sum().to(length.device) for product in products]).sum()
    inner = summed(inner, left) if sharded(left) else inner
    square = length**2
    share = torch.where(square == 0, 0.0, inner / square)
    return list(torch._foreach_sub(local(left), scaled(right, share))), share.abs() * length
