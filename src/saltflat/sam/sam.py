"""SAM: step with the gradient at the worst point nearby."""

from __future__ import annotations

from torch import Tensor

from saltflat.core.registry import register
from saltflat.sam.base import SharpnessAware, norm


@register("optimizer", "sam", passes="2 + 2", paper="Foret et al., ICLR 2021")
class SAM(SharpnessAware):
    r"""Sharpness-Aware Minimization.

    .. math:: \hat\epsilon(w) = \rho \, g / \|g\|, \qquad
        w \leftarrow w - \eta \nabla L(w + \hat\epsilon(w))
        \qquad \text{(4) of the SAF paper}

    The norm is over all groups. A step takes two passes.

    Args:
        base_optimizer: The optimizer that takes the steps.
        rho: The paper's: 0.05 for ResNets, 0.1 for WRN-28-10, 0.2 for PyramidNet-110.
        interval: Climb in every `interval`-th step; the others are plain steps.
        model: The model, so that the second pass leaves its BatchNorm statistics alone.
        m_sharpness: Under DistributedDataParallel, let each rank climb along its own gradient.

    Example:
        >>> import torch
        >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> optimizer = SAM(torch.optim.SGD([w], lr=0.1), rho=0.5)
        >>> def closure():  # the loss |w|^2 / 2, so g = w, |g| = 5 and e(w) = w / 10
        ...     optimizer.zero_grad()
        ...     loss = (w**2).sum() / 2
        ...     loss.backward()
        ...     return loss
        >>> optimizer.step(closure)
        tensor(12.5000, grad_fn=<DivBackward0>)
        >>> w  # w - 0.1 * 1.1 w
        tensor([2.6700, 3.5600], requires_grad=True)

    References:
        Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization,
        ICLR 2021.
    """

    def _directions(
        self, parameters: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        return gradients, norm(gradients) + 1e-12
