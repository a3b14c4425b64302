"""LookSAM: SAM every few steps, its direction reused between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.core.distributed import local
from saltflat.sam._algebra import add_, copies, inner, norm, ratio
from saltflat.sam._wrapper import Gradients
from saltflat.sam.sam import SAM


class LookSAM(SAM):
    r"""SAM in every `interval`-th step; the others reuse what it changed in the gradient.

    .. math:: g_v = g_{adv} - \frac{\langle g_{adv}, g \rangle}{\|g\|^2} g, \qquad
        g \leftarrow g + \alpha \frac{\|g\|}{\|g_v\|} g_v

    (k - 1 + 2) / k passes a step on average: 1.2 with the default. Norms and projections are over
    all parameters.

    Args:
        base_optimizer: The optimizer that takes the steps.
        rho: How far to climb.
        interval: The paper's k.
        alpha: How much of the kept direction the steps between use.
        model: The model, so that its BatchNorm statistics are those of the first pass alone.

    References:
        Liu et al., Towards Efficient and Scalable Sharpness-Aware Minimization, CVPR 2022.
    """

    _keeps_gradients = True

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        rho: float = 0.1,
        interval: int = 5,
        alpha: float = 0.7,
        model: nn.Module | None = None,
    ) -> None:
        if not alpha >= 0:
            raise ValueError(f"alpha must be 0 or more, got {alpha}")
        self.alpha = alpha
        self._kept: dict[Tensor, Tensor] = {}
        self._kept_norm: Tensor | None = None
        super().__init__(base_optimizer, rho=rho, interval=interval, model=model)

    def _combine(self, first: Gradients, scaler: torch.amp.GradScaler | None) -> None:
        if not first[0]:
            self._reuse()
        elif self.interval > 1:
            self._keep(first, scaled=scaler is not None)

    def _keep(self, first: Gradients, scaled: bool) -> None:
        """Keep g_v, the part of g_adv that is orthogonal to g."""
        both = [(p, g) for p, g in zip(*first, strict=True) if p.grad is not None]
        if not both:
            return
        parameters, plain = [list(part) for part in zip(*both, strict=True)]
        adversarial = [p.grad for p in parameters if p.grad is not None]
        plain_norm = norm(plain)
        share = ratio(inner(adversarial, plain), plain_norm**2)
        same = [id(p) for p in self._kept] == [id(p) for p in parameters]
        if self._kept_norm is None or not same:
            self._kept = dict(zip(parameters, copies(adversarial), strict=True))
            self._kept_norm = torch.empty_like(share)
        else:  # in place, where a captured step looks for it
            torch._foreach_copy_(local(self._kept.values()), local(adversarial))
        orthogonal = list(self._kept.values())
        add_(orthogonal, plain, -share)
        length = norm(orthogonal)
        # What is no longer than rounding is no direction.
        least = 100 * torch.finfo(length.dtype).eps * torch.hypot(length, share * plain_norm)
        usable = length.isfinite() & (length > least)
        if scaled:  # after an overflow: infinities times zero would be NaN
            for kept in local(orthogonal):
                kept.masked_fill_(~usable.to(kept.device), 0.0)
        self._kept_norm.copy_(torch.where(usable, length, 0.0))

    def _reuse(self) -> None:
        """Add alpha |g| / |g_v| g_v to the gradient."""
        both = [(p.grad, kept) for p, kept in self._kept.items() if p.grad is not None]
        if not both or self._kept_norm is None:
            return
        _, gradients = self._gradients()
        factor = self.alpha * ratio(norm(gradients), self._kept_norm)
        add_([gradient for gradient, _ in both], [kept for _, kept in both], factor)

    def _method_state(self) -> dict[str, Any]:
        kept = {i: self._kept[p] for i, p in enumerate(self._parameters()) if p in self._kept}
        return {**super()._method_state(), "kept": kept, "kept_norm": self._kept_norm}

    def _load_method_state(self, state: dict[str, Any]) -> None:
        super()._load_method_state(state)
        parameters = self._parameters()
        self._kept = {
            parameters[i]: kept.to(parameters[i].device, copy=True)
            for i, kept in state.get("kept", {}).items()
        }
        length = state.get("kept_norm")
        self._kept_norm = None if length is None else length.to(parameters[0].device, copy=True)
