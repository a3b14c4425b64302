"""ASAM: SAM in a neighbourhood that scales with the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.core.distributed import local
from saltflat.core.registry import register
from saltflat.sam.base import SharpnessAware, check, norm


@register("optimizer", "asam", passes="2 + 2", paper="Kwon et al., ICML 2021")
class ASAM(SharpnessAware):
    r"""Adaptive Sharpness-Aware Minimization.

    .. math:: \hat\epsilon(w) = \rho \, T_w^2 g / \|T_w g\|, \qquad T_w = |w| + \eta

    T is 1 for parameters of at most one dimension (biases, normalisation). Multiplying one layer
    by a factor and dividing the next by it changes neither the network nor, except for eta, the
    step.

    Args:
        base_optimizer: The optimizer that takes the steps.
        rho: 0.5 on CIFAR-10, 1.0 on CIFAR-100.
        eta: Added to T.
        interval: Climb in every `interval`-th step; the others are plain steps.
        model: The model, so that the second pass leaves its BatchNorm statistics alone.
        m_sharpness: Under DistributedDataParallel, let each rank climb along its own gradient.

    References:
        Kwon et al., ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of
        Deep Neural Networks, ICML 2021.
    """

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        rho: float = 0.5,
        eta: float = 0.01,
        interval: int = 1,
        model: nn.Module | None = None,
        m_sharpness: bool = False,
    ) -> None:
        check("eta", eta)
        self.eta = eta
        super().__init__(
            base_optimizer, rho=rho, interval=interval, model=model, m_sharpness=m_sharpness
        )

    def _directions(
        self, parameters: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        directions, length = adaptive_direction(parameters, gradients, self.eta)
        return directions, length + 1e-12


def adaptive_direction(
    parameters: list[Tensor], directions: list[Tensor], eta: float
) -> tuple[list[Tensor], Tensor]:
    """T^2 d for the direction d of each parameter, and |T d| of all."""
    products = list(torch._foreach_mul(directions, 1))
    matrices = [i for i, p in enumerate(parameters) if p.dim() > 1]
    if not matrices:
        return products, norm(products)
    t = torch._foreach_abs(local(parameters[i] for i in matrices))
    torch._foreach_add_(t, eta)
    torch._foreach_mul_(local(products[i] for i in matrices), t)
    length = norm(products)
    torch._foreach_mul_(local(products[i] for i in matrices), t)
    return products, length
