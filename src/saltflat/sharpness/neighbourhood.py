"""How much the loss rises within rho of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.sharpness._interval import mean_interval
from saltflat.sharpness._objective import (
    Batches,
    Loss,
    Objective,
    Policy,
    check_at_least,
    check_rho,
    objective,
)
from saltflat.sharpness.result import Sharpness


def sam_sharpness(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    *,
    rho: float = 0.05,
    batchnorm: Policy = "eval",
) -> float:
    r"""SAM's sharpness: the rise of the loss a step of length rho up the gradient.

    .. math:: R(\theta) = L(\theta + \rho g / \|g\|) - L(\theta) \qquad \text{(3), (4)}

    The loss and the gradient are those of all the batches together. The model is left as it was.

    Args:
        model: The model.
        loss_fn: From outputs and labels to the mean loss of a batch.
        batches: Inputs and labels; gone through again and again, so not a generator.
        rho: How far.
        batchnorm: What BatchNorm normalises with: "eval", "recalibrated" or "batch".

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
    return one_step(model, loss_fn, batches, rho=rho, batchnorm=batchnorm).value


def one_step(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    *,
    rho: float = 0.05,
    batchnorm: Policy = "eval",
) -> Sharpness:
    """`sam_sharpness`, and what it was measured with."""
    check_rho(rho)
    with objective(model, loss_fn, batches, batchnorm) as of:
        before, after = climb(of, rho, steps=1)
    return Sharpness(value=after - before, rho=rho, **of.facts())


def max_sharpness(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    *,
    rho: float = 0.05,
    steps: int = 20,
    batchnorm: Policy = "eval",
) -> Sharpness:
    r"""The greatest rise that is found by climbing within rho of the weights.

    .. math:: \max_{\|\epsilon\| \le \rho} L(\theta + \epsilon) - L(\theta)

    Each step goes rho along the gradient where it is, and back into the ball if it has left it; the
    first is SAM's. The greatest of the losses that were met counts, the one at the weights
    included: so more steps never give less, and `sam_sharpness` never more.

    Args:
        model: The model.
        loss_fn: From outputs and labels to the mean loss of a batch.
        batches: Inputs and labels; gone through again and again, so not a generator.
        rho: The ball's radius.
        steps: How many; each costs a forward and a backward pass, and one forward pass comes last.
        batchnorm: What BatchNorm normalises with: "eval", "recalibrated" or "batch".

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(3.0)
        >>> data = [(torch.ones(1, 1), torch.zeros(1, 1))]
        >>> square = lambda out, y: ((out - y) ** 2).mean()
        >>> round(max_sharpness(model, square, data, rho=0.5, steps=3).value, 4)
        3.25
    """
    check_rho(rho)
    check_at_least(1, steps=steps)
    with objective(model, loss_fn, batches, batchnorm) as of:
        losses = climb(of, rho, steps)
    return Sharpness(value=greatest_rise(losses), rho=rho, **of.facts())


def m_sharpness(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    *,
    rho: float = 0.05,
    m: int = 128,
    batchnorm: Policy = "eval",
) -> Sharpness:
    r"""The mean of SAM's sharpness over groups of m rows, each with a climb of its own.

    .. math:: \frac{1}{k} \sum_{j=1}^{k} L_j(\theta + \rho g_j / \|g_j\|) - L_j(\theta)

    This is what SAM with batches of m sees; it grows as m shrinks. The interval is over the groups,
    as draws from the data that the rows were drawn from.

    Args:
        model: The model.
        loss_fn: From outputs and labels to the mean loss of a batch.
        batches: Inputs and labels, taken in order; rows that do not fill a group are left out.
        rho: How far.
        m: Rows of a group.
        batchnorm: What BatchNorm normalises with; of the group itself where it is not "eval".

    References:
        Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization,
        ICLR 2021, section 4.1.
    """
    check_rho(rho)
    check_at_least(1, m=m)
    rises = []
    with objective(model, loss_fn, batches, batchnorm) as of:
        for group in _groups(of, m):
            before, after = climb(of.on([group]), rho, steps=1)
            rises.append(after - before)
    if not rises:
        raise ValueError(f"m is {m}, and there are {of.images} rows: choose a smaller m")
    of.images = m * len(rises)  # without those left out
    return Sharpness(value=fmean(rises), rho=rho, interval=mean_interval(rises), **of.facts())


def climb(of: Objective, rho: float, steps: int, scales: Tensor | None = None) -> list[float]:
    """The losses at the weights and after each step of an ascent within rho of them.

    Args:
        of: The loss.
        rho: The radius, of the offsets divided by the scales.
        steps: How many.
        scales: Of each weight; 1 unless said.
    """
    losses, place, offset = [], None, None
    for _ in range(steps):
        with of.at(offset):
            loss, gradient = of.loss_and_gradient()
        losses.append(loss)
        uphill = gradient if scales is None else gradient * scales
        step = rho * uphill / (uphill.norm() + 1e-12)
        place = step if place is None else _within(place + step, rho)
        offset = place if scales is None else place * scales
    with of.at(offset):
        losses.append(of.loss())
    return losses


def greatest_rise(losses: list[float]) -> float:
    """Above the first of them; not a number if one of them is none."""
    return float(np.max(losses)) - losses[0]


def _within(place: Tensor, rho: float) -> Tensor:
    """The nearest point of the ball."""
    return place * (rho / place.norm().clamp_min(max(rho, 1e-12)))


def _groups(of: Objective, m: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of all the batches, m at a time."""
    x = y = None
    for images, labels in of.visit():
        x = images if x is None else torch.cat([x, images])
        y = labels if y is None else torch.cat([y, labels])
        while len(x) >= m:
            yield x[:m], y[:m]
            x, y = x[m:], y[m:]
