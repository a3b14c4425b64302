"""Sharpness where a weight's neighbourhood is as wide as the weight is large.

Scaling a layer up and the next one down by the same factor leaves a network with ReLUs as it is,
and makes its sharpness anything one likes. These two do not change with it: offsets are divided by
|weight| before their length is taken.
"""

from __future__ import annotations

from statistics import fmean

import torch
from torch import nn

from saltflat.sharpness._interval import mean_interval
from saltflat.sharpness._objective import (
    Batches,
    Loss,
    Policy,
    check_at_least,
    check_rho,
    objective,
)
from saltflat.sharpness.neighbourhood import climb, greatest_rise
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
    r"""The worst case: the greatest rise that is found by climbing.

    .. math:: \max_{\|\epsilon / |\theta|\| \le \rho} L(\theta + \epsilon) - L(\theta)

    The first step is ASAM's without its eta, and so that scales are |theta| of biases too. A weight
    that is zero stays.

    Args:
        model: The model.
        loss_fn: From outputs and labels to the mean loss of a batch.
        batches: Inputs and labels; gone through again and again, so not a generator.
        rho: The radius: of all relative changes together, as a Euclidean norm.
        steps: How many; see `max_sharpness`.
        batchnorm: What BatchNorm normalises with: "eval", "recalibrated" or "batch".

    Example:
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
    check_rho(rho)
    check_at_least(1, steps=steps)
    with objective(model, loss_fn, batches, batchnorm) as of:
        losses = climb(of, rho, steps, scales=of.weights().abs())
    return Sharpness(value=greatest_rise(losses), rho=rho, **of.facts())


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
    r"""The average case: the mean rise when every weight is off by rho of itself, at random.

    .. math:: E \, L(\theta + \epsilon) - L(\theta), \qquad
        \epsilon \sim N(0, \rho^2 \, \mathrm{diag}(\theta^2))

    Args:
        model: The model.
        loss_fn: From outputs and labels to the mean loss of a batch.
        batches: Inputs and labels; gone through again and again, so not a generator.
        rho: The deviation of a weight, as a share of it. Unlike a radius, it is each weight's own.
        draws: How many; each costs a forward pass. The interval is over them.
        seed: Of the draws; they are the same on every device.
        batchnorm: What BatchNorm normalises with: "eval", "recalibrated" or "batch".

    References:
        Andriushchenko et al., A Modern Look at the Relationship between Sharpness and
        Generalization, ICML 2023.
    """
    check_rho(rho)
    check_at_least(2, draws=draws)
    generator = torch.Generator().manual_seed(seed)
    rises = []
    with objective(model, loss_fn, batches, batchnorm) as of:
        scales = rho * of.weights().abs()
        with of.at():
            before = of.loss()
        for _ in range(draws):
            normal = torch.randn(of.size, generator=generator, dtype=of.dtype)
            with of.at(normal.to(of.device) * scales):
                rises.append(of.loss() - before)
    return Sharpness(value=fmean(rises), rho=rho, interval=mean_interval(rises), **of.facts())
