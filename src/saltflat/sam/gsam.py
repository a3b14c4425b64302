"""GSAM: SAM that also lowers the loss at the weights themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.core.distributed import local
from saltflat.sam._algebra import add_, inner, norm, ratio
from saltflat.sam._wrapper import Gradients
from saltflat.sam.sam import SAM


class GSAM(SAM):
    r"""Surrogate Gap Guided Sharpness-Aware Minimization.

    .. math:: g_\perp = g - \frac{\langle g, g_{adv} \rangle}{\|g_{adv}\|^2} g_{adv}, \qquad
        \theta \leftarrow \theta - \eta (g_{adv} - \alpha g_\perp)

    with g at the weights and g_adv where SAM climbs to. rho follows the learning rate, from `rho`
    at `lr_max` down to `rho_min` at `lr_min`. Two passes a step.

    Args:
        base_optimizer: The optimizer that takes the steps, and whose learning rate is followed.
        rho: 0.04 for ResNet-50 and ResNet-101 on ImageNet, 0.6 for ViT-S/32.
        rho_min: 0.02 for these ResNets, 0 for ViT-S/32.
        alpha: 0.01 for these ResNets, 0.4 for ViT-S/32.
        lr_max: The learning rate at which rho is `rho`; None: the schedule's highest, where it is
            noted in the groups as "max_lr" or "initial_lr", or else the optimizer's own.
        lr_min: The learning rate at which rho is `rho_min`.
        interval: Climb in every `interval`-th step only; the others are plain steps.
        model: The model, so that its BatchNorm statistics are those of the first pass alone.

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
        if not alpha >= 0:
            raise ValueError(f"alpha must be 0 or more, got {alpha}")
        if not 0 <= rho_min <= rho:
            raise ValueError(f"rho_min must be within [0, rho={rho}], got {rho_min}")
        self.alpha = alpha
        self.rho_min = rho_min
        self.lr_max = lr_max
        self.lr_min = lr_min
        self._first_lr: float | None = None
        super().__init__(base_optimizer, rho=rho, interval=interval, model=model)
        self._first_lr = float(self.defaults["lr"])  # which a schedule may change in place

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if "lr" in group and not self._peak(group) > self.lr_min:
            raise ValueError(
                f"lr_max must be above lr_min={self.lr_min}, got {self._peak(group)}: give the "
                "schedule's highest learning rate as lr_max"
            )

    def _peak(self, group: dict[str, Any]) -> float:
        """The highest learning rate: as given, or as a schedule notes it, or the first one."""
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
        """rho_min + (rho - rho_min) * (lr - lr_min) / (lr_max - lr_min), within the two."""
        share = (group["lr"] - self.lr_min) / (self._peak(group) - self.lr_min)
        share = share.clamp(0, 1) if isinstance(share, Tensor) else min(max(share, 0.0), 1.0)
        rho = group.get("rho", self.rho)
        lowest = min(self.rho_min, rho)
        return lowest + (rho - lowest) * share

    def _combine(self, first: Gradients, scaler: torch.amp.GradScaler | None) -> None:
        pairs = [(p.grad, g) for p, g in zip(*first, strict=True) if p.grad is not None]
        if self.alpha == 0 or not pairs:
            return
        adversarial, plain = [list(part) for part in zip(*pairs, strict=True)]
        if scaler is not None and self._unscaled_by(scaler):
            torch._foreach_div_(plain, scaler.get_scale())
        share = ratio(inner(plain, adversarial), norm(adversarial) ** 2)
        add_(plain, adversarial, -share)  # which leaves g_perp
        torch._foreach_sub_(local(adversarial), local(plain), alpha=self.alpha)

    def _unscaled_by(self, scaler: torch.amp.GradScaler) -> bool:
        """Whether the second pass's gradients are unscaled already, for clipping."""
        if not scaler.is_enabled():
            return False
        return bool(scaler._per_optimizer_states[id(self)]["stage"].name == "UNSCALED")
