"""How much the loss rises within rho of the weights."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.core.statistics import check_scipy, interval
from saltflat.sharpness.objective import Batches, Loss, Objective, Policy, check, open_objective
from saltflat.sharpness.result import Sharpness


def sam_sharpness(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    *,
    rho: float = 0.05,
    batchnorm: Policy = "eval",
) -> float:
    r"""SAM's sharpness: the rise of the loss after a step of length rho up the gradient.

    .. math:: R(\theta) = L(\theta + \rho g / \|g\|) - L(\theta) \qquad \text{(3), (4)}

    The loss and the gradient are those of all the batches together. The model is left as it was.

    Args:
        model: The model.
        loss_fn: Maps outputs and labels to the mean loss of a batch.
        batches: Pairs of inputs and labels; drawn once and kept where they are.
        rho: The length of the step.
        batchnorm: What BatchNorm normalises with: "eval", "recalibrated" or "batch".

    Returns:
        The rise. It is near rho times the gradient's norm where the loss is nearly linear.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a value is out of range, or no parameter requires a gradient.

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
    return one_step(model, loss_fn, batches, rho=rho, batchnorm=batchnorm).value


def one_step(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    *,
    rho: float = 0.05,
    batchnorm: Policy = "eval",
) -> Sharpness:
    """`sam_sharpness` with how it was measured."""
    check(rho=rho)
    with open_objective(model, loss_fn, batches, batchnorm) as objective:
        before, after = climb(objective, rho, steps=1)
    return Sharpness(value=after - before, rho=rho, **objective.facts())


def max_sharpness(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    *,
    rho: float = 0.05,
    steps: int = 20,
    batchnorm: Policy = "eval",
) -> Sharpness:
    r"""The greatest rise that an ascent finds within rho of the weights.

    .. math:: \max_{\|\epsilon\| \le \rho} L(\theta + \epsilon) - L(\theta)

    Each step has length rho along the gradient and is projected back into the ball. The first is
    SAM's. The result is the greatest loss on the way, the start included. Therefore more steps
    never give less, and `sam_sharpness` never gives more.

    Args:
        model: The model.
        loss_fn: Maps outputs and labels to the mean loss of a batch.
        batches: Pairs of inputs and labels; drawn once and kept where they are.
        rho: The ball's radius.
        steps: Each costs a forward and a backward pass; one forward pass comes last.
        batchnorm: What BatchNorm normalises with: "eval", "recalibrated" or "batch".

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(3.0)
        >>> data = [(torch.ones(1, 1), torch.zeros(1, 1))]
        >>> square = lambda out, y: ((out - y) ** 2).mean()
        >>> round(max_sharpness(model, square, data, rho=0.5, steps=3).value, 4)
        3.25
    """
    check(rho=rho, steps=steps)
    with open_objective(model, loss_fn, batches, batchnorm) as objective:
        losses = climb(objective, rho, steps)
    return Sharpness(value=greatest_rise(losses), rho=rho, **objective.facts())


def m_sharpness(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    *,
    rho: float = 0.05,
    m: int = 128,
    batchnorm: Policy = "eval",
) -> Sharpness:
    r"""The mean of SAM's sharpness over groups of m rows, each with its own ascent.

    .. math:: \frac{1}{k} \sum_{j=1}^{k} L_j(\theta + \rho g_j / \|g_j\|) - L_j(\theta)

    SAM with batches of m rows sees this. It grows as m shrinks. The interval is over the groups, as
    draws from the distribution of the data.

    Args:
        model: The model.
        loss_fn: Maps outputs and labels to the mean loss of a batch.
        batches: Pairs of tensors, grouped in order; rows that do not fill a group are left out.
        rho: The length of the step.
        m: Rows of a group.
        batchnorm: What BatchNorm normalises with; statistics are the group's unless "eval".

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a value is out of range, or there are fewer than m rows.

    References:
        Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization,
        ICLR 2021, section 4.1.
    """
    check(rho=rho, m=m)
    check_scipy()
    rises = []
    with open_objective(model, loss_fn, batches, batchnorm) as objective:
        if m > objective.images:
            raise ValueError(f"m must be <= {objective.images}, the number of rows, got {m}")
        x, y = (torch.cat(parts) for parts in zip(*objective.batches, strict=True))
        groups = zip(x.split(m), y.split(m), strict=True)
        objective.batches = [(x, y) for x, y in groups if len(x) == m]
        for group in objective.batches:
            before, after = climb(objective.of_group(*group), rho, steps=1)
            rises.append(after - before)
    mean = interval(rises)
    return Sharpness(value=mean.mean, rho=rho, interval=mean, **objective.facts())


def climb(
    objective: Objective, rho: float, steps: int, scales: Tensor | None = None
) -> list[float]:
    """The losses at the weights and after each step of an ascent within rho of them.

    Args:
        objective: The loss.
        rho: The radius of the ball, for offsets divided by the scales.
        steps: Number of steps.
        scales: One for each weight; None: all 1.
    """
    losses, position, offset = [], None, None
    for _ in range(steps):
        with objective.at(offset):
            loss, gradient = objective.loss_and_gradient()
        losses.append(loss)
        uphill = gradient if scales is None else gradient * scales
        step = rho * uphill / (uphill.norm() + 1e-12)
        position = step if position is None else position + step
        position *= rho / position.norm().clamp_min(max(rho, 1e-12))  # back into the ball
        offset = position if scales is None else position * scales
    with objective.at(offset):
        losses.append(objective.loss())
    return losses


def greatest_rise(losses: list[float]) -> float:
    """The maximum above the first loss; NaN if any loss is NaN."""
    return float(np.max(losses)) - losses[0]
