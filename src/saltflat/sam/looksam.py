"""LookSAM: SAM every few steps, its direction reused in the steps between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.core.distributed import local
from saltflat.core.registry import register
from saltflat.sam.base import Gradients, check, norm, scaled
from saltflat.sam.gsam import orthogonal
from saltflat.sam.sam import SAM


@register("optimizer", "looksam", passes="1.2 + 1.2", paper="Liu et al., CVPR 2022")
class LookSAM(SAM):
    r"""SAM in every `interval`-th step; the others reuse how it changed the gradient.

    .. math:: g_v = g_{adv} - \frac{\langle g_{adv}, g \rangle}{\|g\|^2} g, \qquad
        g \leftarrow g + \alpha \frac{\|g\|}{\|g_v\|} g_v

    A step takes (k - 1 + 2) / k passes on average: 1.2 with the default. Norms and projections are
    over all parameters.

    Args:
        base_optimizer: The optimizer that takes the steps.
        rho: How far to climb.
        interval: The paper's k.
        alpha: The weight of g_v in the steps between.
        model: The model, so that the second pass leaves its BatchNorm statistics alone.

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
        check("alpha", alpha)
        self.alpha = alpha
        self._kept: dict[Tensor, Tensor] = {}  # g_v by parameter
        self._kept_norm: Tensor | None = None
        super().__init__(base_optimizer, rho=rho, interval=interval, model=model)

    @property
    def nbytes(self) -> int:
        """Bytes of g_v, which is kept between steps."""
        return sum(tensor.nbytes for tensor in local(self._kept.values()))

    def _combine(self, first: Gradients, scaler: torch.amp.GradScaler | None) -> None:
        if not first[0]:
            self._reuse()
        elif self.interval > 1:
            self._keep(first, may_overflow=scaler is not None)

    def _keep(self, first: Gradients, may_overflow: bool) -> None:
        """Keep g_v, the part of g_adv that is orthogonal to g."""
        both = [(p, p.grad, g) for p, g in zip(*first, strict=True) if p.grad is not None]
        if not both:
            return
        parameters, g_adv, g = [list(part) for part in zip(*both, strict=True)]
        g_v, removed = orthogonal(g_adv, g)
        same = [id(p) for p in self._kept] == [id(p) for p in parameters]
        if self._kept_norm is None or not same:
            self._kept = {
                p: torch.empty_like(part) for p, part in zip(parameters, g_adv, strict=True)
            }
            self._kept_norm = torch.empty_like(removed)
        kept = list(self._kept.values())
        torch._foreach_copy_(local(kept), g_v)  # in place: a CUDA graph reads it there
        length = norm(kept)
        # A part no longer than the rounding error is no direction.
        least = 100 * torch.finfo(length.dtype).eps * torch.hypot(length, removed)
        usable = length.isfinite() & (length > least)
        if may_overflow:  # after an overflow, infinity times 0 would be NaN
            for tensor in local(kept):
                tensor.masked_fill_(~usable.to(tensor.device), 0.0)
        self._kept_norm.copy_(torch.where(usable, length, 0.0))

    def _reuse(self) -> None:
        """Add alpha |g| / |g_v| g_v to the gradient g."""
        both = [(p.grad, g_v) for p, g_v in self._kept.items() if p.grad is not None]
        if not both or self._kept_norm is None:
            return
        length = norm(self._gradients()[1])
        factor = torch.where(self._kept_norm == 0, 0.0, self.alpha * length / self._kept_norm)
        gradients, kept = [list(part) for part in zip(*both, strict=True)]
        torch._foreach_add_(local(gradients), scaled(kept, factor))

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
