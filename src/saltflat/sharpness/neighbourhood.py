"""How much the loss rises within rho of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from saltflat._batchnorm import frozen_running_stats
from saltflat._perturb import displaced

Batches = Iterable[tuple[Tensor, Tensor]]


def sam_sharpness(
    model: nn.Module,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    batches: Batches,
    *,
    rho: float = 0.05,
) -> float:
    r"""SAM's sharpness: the rise of the loss a step of length rho up the gradient.

    .. math:: R(\theta) = L(\theta + \rho g / \|g\|) - L(\theta) \qquad \text{(3), (4)}

    The loss and the gradient are those of all the batches together, in evaluation mode. The model
    is left as it was.

    Args:
        model: The model.
        loss_fn: From outputs and labels to the mean loss of a batch.
        batches: Inputs and labels; gone through three times, so not a generator.
        rho: How far.

    Returns:
        The rise; near rho times the gradient's norm where the loss is nearly linear.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(3.0)
        >>> data = [(torch.ones(1, 1), torch.zeros(1, 1))]
        >>> square = lambda out, y: ((out - y) ** 2).mean()
        >>> round(sam_sharpness(model, square, data, rho=0.5), 4)  # 3.5^2 - 3^2
        3.25

    References:
        Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization,
        ICLR 2021.
    """
    if not rho >= 0:
        raise ValueError(f"rho must be 0 or more, got {rho}")
    if isinstance(batches, Iterator):
        raise ValueError(
            f"batches are gone through three times, got a {type(batches).__name__}: pass a list"
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    with _evaluating(model):
        gradients = _gradient(model, loss_fn, batches, parameters)
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
        offsets = [rho * g / (norm + 1e-12) for g in gradients]
        with torch.no_grad():
            before = _loss(model, loss_fn, batches)
            with displaced(parameters, offsets):
                return _loss(model, loss_fn, batches) - before


def _loss(model: nn.Module, loss_fn: Callable[..., Tensor], batches: Batches) -> float:
    """The mean loss over all rows."""
    total, count = 0.0, 0
    for x, y in batches:
        total += float(loss_fn(model(x), y)) * len(x)
        count += len(x)
    return total / count


def _gradient(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batches: Batches,
    parameters: list[nn.Parameter],
) -> list[Tensor]:
    """The gradient of the summed loss; only its direction matters."""
    sums = [torch.zeros_like(p) for p in parameters]
    for x, y in batches:
        with torch.enable_grad():
            loss = loss_fn(model(x), y) * len(x)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                total += gradient
    return sums


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with frozen_running_stats(model):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
