"""ASAM: SAM in a neighbourhood that scales with the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.core.distributed import local
from saltflat.sam._algebra import copies, norm
from saltflat.sam._wrapper import SharpnessAware


class ASAM(SharpnessAware):
    r"""Adaptive Sharpness-Aware Minimization.

    .. math:: \hat\epsilon = \rho \, T^2 g / \|T g\|, \qquad T = |\theta| + \eta

    T is 1 for biases and normalisation, that is, for parameters of at most one dimension. Scaling
    a layer up and the next one down changes nothing in the network, and, but for eta, nothing here.

    Args:
        base_optimizer: The optimizer that takes the steps.
        rho: 0.5 on CIFAR-10, 1.0 on CIFAR-100.
        eta: Added to T.
        interval: Climb in every `interval`-th step only; the others are plain steps.
        model: The model, so that its BatchNorm statistics are those of the first pass alone.
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
        if not eta >= 0:
            raise ValueError(f"eta must be 0 or more, got {eta}")
        self.eta = eta
        super().__init__(
            base_optimizer, rho=rho, interval=interval, model=model, m_sharpness=m_sharpness
        )

    def _directions(
        self, parameters: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        directions, length = adaptive_direction(parameters, gradients, self.eta)
        return directions, 1 / (length + 1e-12)


def adaptive_direction(
    parameters: list[Tensor], directions: list[Tensor], eta: float
) -> tuple[list[Tensor], Tensor]:
    """T^2 d for each parameter's direction d, and |T d| of all together."""
    scaled = copies(directions)
    matrices = [i for i, p in enumerate(parameters) if p.dim() > 1]
    if not matrices:
        return scaled, norm(scaled)
    t = torch._foreach_abs(local(parameters[i] for i in matrices))
    torch._foreach_add_(t, eta)
    torch._foreach_mul_(local(scaled[i] for i in matrices), t)
    length = norm(scaled)
    torch._foreach_mul_(local(scaled[i] for i in matrices), t)
    return scaled, length
