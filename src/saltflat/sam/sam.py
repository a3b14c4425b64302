"""SAM: step with the gradient at the worst point nearby."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from saltflat.sam._algebra import norm
from saltflat.sam._wrapper import SharpnessAware


class SAM(SharpnessAware):
    r"""Sharpness-Aware Minimization.

    .. math:: \hat\epsilon = \rho \, g / \|g\|, \qquad
        \theta \leftarrow \theta - \eta \nabla L(\theta + \hat\epsilon)
        \qquad \text{(4) of the SAF paper}

    One norm over all groups; two passes a step.

    Args:
        base_optimizer: The optimizer that takes the steps.
        rho: The paper's: 0.05 for ResNets, 0.1 for WRN-28-10, 0.2 for PyramidNet-110.
        interval: Climb in every `interval`-th step only; the others are plain steps.
        model: The model, so that its BatchNorm statistics are those of the first pass alone.
        m_sharpness: Under DistributedDataParallel, let each rank climb along its own gradient.

    Example:
        >>> import torch
        >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> optimizer = SAM(torch.optim.SGD([w], lr=0.1), rho=0.5)
        >>> def closure():  # the loss |w|^2 / 2, so g = w, |g| = 5 and e = w / 10
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

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        rho: float = 0.05,
        interval: int = 1,
        model: nn.Module | None = None,
        m_sharpness: bool = False,
    ) -> None:
        super().__init__(
            base_optimizer, rho=rho, interval=interval, model=model, m_sharpness=m_sharpness
        )

    def _directions(
        self, parameters: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        return gradients, 1 / (norm(gradients) + 1e-12)
