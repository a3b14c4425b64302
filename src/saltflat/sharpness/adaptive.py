"""Sharpness in a neighbourhood that is proportional to each weight.

Scaling one layer of a ReLU network up and the next one down leaves the function as it was. It can
give `sam_sharpness` any value. The two measures here do not change: they divide each offset by
|weight| before they take its length.
"""

from __future__ import annotations

from torch import nn

from saltflat.core.statistics import check_scipy, interval
from saltflat.sharpness.neighbourhood import climb, greatest_rise
from saltflat.sharpness.objective import Batches, Loss, Policy, check, open_objective
from saltflat.sharpness.result import Sharpness


def adaptive_sharpness(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    *,
    rho: float = 0.5,
    steps: int = 20,
    batchnorm: Policy = "eval",
) -> Sharpness:
    r"""The worst case: the greatest rise that an ascent finds.

    .. math:: \max_{\|\epsilon / |\theta|\| \le \rho} L(\theta + \epsilon) - L(\theta)

    The first step is ASAM's with eta = 0 and biases scaled by |theta| too. A weight of zero does
    not move.

    Args:
        model: The model.
        loss_fn: Maps outputs and labels to the mean loss of a batch.
        batches: Pairs of inputs and labels; drawn once and kept where they are.
        rho: The radius: the Euclidean norm of all relative changes together.
        steps: Each costs a forward and a backward pass; one forward pass comes last.
        batchnorm: What BatchNorm normalises with: "eval", "recalibrated" or "batch".

    Example:
        >>> import torch
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(3.0)
        >>> data = [(torch.ones(1, 1), torch.zeros(1, 1))]
        >>> square = lambda out, y: ((out - y) ** 2).mean()
        >>> round(adaptive_sharpness(model, square, data, rho=0.5).value, 4)  # (3 + 1.5)^2 - 3^2
        11.25

    References:
        Kwon et al., ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant Learning of
        Deep Neural Networks, ICML 2021.
        Andriushchenko et al., A Modern Look at the Relationship between Sharpness and
        Generalization, ICML 2023.
    """
    check(rho=rho, steps=steps)
    with open_objective(model, loss_fn, batches, batchnorm) as objective:
        losses = climb(objective, rho, steps, scales=objective.weights().abs())
    return Sharpness(value=greatest_rise(losses), rho=rho, **objective.facts())


def average_sharpness(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    *,
    rho: float = 0.1,
    draws: int = 20,
    seed: int = 0,
    batchnorm: Policy = "eval",
) -> Sharpness:
    r"""The average case: the mean rise under random relative changes of every weight.

    .. math:: E \, L(\theta + \epsilon) - L(\theta), \qquad
        \epsilon \sim N(0, \rho^2 \, \mathrm{diag}(\theta^2))

    Args:
        model: The model.
        loss_fn: Maps outputs and labels to the mean loss of a batch.
        batches: Pairs of inputs and labels; drawn once and kept where they are.
        rho: The standard deviation of each weight's offset, as a share of the weight.
        draws: Number of offsets; each costs a forward pass. The interval is over them.
        seed: Of the offsets, which are the same on every device.
        batchnorm: What BatchNorm normalises with: "eval", "recalibrated" or "batch".

    References:
        Andriushchenko et al., A Modern Look at the Relationship between Sharpness and
        Generalization, ICML 2023.
    """
    check(rho=rho, draws=draws, seed=seed)
    check_scipy()
    rises = []
    with open_objective(model, loss_fn, batches, batchnorm) as objective:
        scales, normal = rho * objective.weights().abs(), objective.normal(seed)
        with objective.at():
            before = objective.loss()
        for _ in range(draws):
            with objective.at(normal() * scales):
                rises.append(objective.loss() - before)
    mean = interval(rises)
    return Sharpness(value=mean.mean, rho=rho, interval=mean, **objective.facts())
