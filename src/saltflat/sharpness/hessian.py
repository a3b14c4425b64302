"""The Hessian of the loss, by its products with vectors: top eigenvalues, trace, spectrum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.sharpness._interval import mean_interval, quantile
from saltflat.sharpness._lanczos import Array, hutchpp, quadrature, top_pairs
from saltflat.sharpness._objective import (
    Batches,
    Loss,
    Objective,
    Policy,
    check_at_least,
    objective,
)
from saltflat.sharpness.result import Eigenvalues, Spectrum, Trace


def top_eigenvalues(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    *,
    count: int = 1,
    tolerance: float = 1e-3,
    iterations: int = 100,
    seed: int = 0,
    batchnorm: Policy = "eval",
) -> Eigenvalues:
    """The largest eigenvalues of the Hessian, by Lanczos' iteration.

    Largest with their sign: a direction in which the loss falls away is not sharp. An eigenvalue
    that is there several times may be found once. The iteration keeps a vector of all the weights
    for each step.

    Args:
        model: The model.
        loss_fn: From outputs and labels to the mean loss of a batch, twice differentiable.
        batches: Inputs and labels; gone through again and again, so not a generator.
        count: How many.
        tolerance: Stop when every residual is within this share of the largest |eigenvalue|.
        iterations: Stop after so many in any case; each is a product with the Hessian.
        seed: Of the first vector; it is the same on every device.
        batchnorm: What BatchNorm normalises with: "eval", "recalibrated" or "batch".

    Returns:
        Eigenvalues and residuals; `converged` says whether the tolerance was reached.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> data = [(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.zeros(2, 1))]
        >>> square = lambda out, y: ((out - y) ** 2).mean()
        >>> found = top_eigenvalues(model, square, data, count=2)  # of diag(1, 9)
        >>> [round(value, 4) for value in found.values]
        [9.0, 1.0]
    """
    check_at_least(1, count=count, iterations=iterations)
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    if iterations < count:
        raise ValueError(f"iterations must be at least count, got {iterations} and {count}")
    with objective(model, loss_fn, batches, batchnorm) as of, of.at():
        if count > of.size:
            raise ValueError(f"count is {count}, and there are {of.size} weights")
        values, residuals, converged = top_pairs(
            of.products, _normal(of, seed), count, tolerance, iterations
        )
    return Eigenvalues(
        values=tuple(values), residuals=tuple(residuals), converged=converged, **of.facts()
    )


def hessian_trace(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    *,
    hvps: int = 30,
    seed: int = 0,
    batchnorm: Policy = "eval",
) -> Trace:
    """The trace of the Hessian, by Hutch++.

    Args:
        model: The model.
        loss_fn: From outputs and labels to the mean loss of a batch, twice differentiable.
        batches: Inputs and labels; gone through again and again, so not a generator.
        hvps: Products with the Hessian to spend, a multiple of three. As many vectors of all the
            weights are kept.
        seed: Of the random vectors; they are the same on every device.
        batchnorm: What BatchNorm normalises with: "eval", "recalibrated" or "batch".

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> data = [(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.zeros(2, 1))]
        >>> square = lambda out, y: ((out - y) ** 2).mean()
        >>> round(hessian_trace(model, square, data).value, 4)  # of diag(1, 9)
        10.0

    References:
        Meyer, Musco, Musco and Woodruff, Hutch++: Optimal Stochastic Trace Estimation, SOSA 2021.
    """
    if hvps < 6 or hvps % 3:
        raise ValueError(f"hvps must be a multiple of three, at least 6, got {hvps}")
    with objective(model, loss_fn, batches, batchnorm) as of, of.at():
        value, draws = hutchpp(of.products, _signs(of, seed), hvps)
    interval = mean_interval(draws)
    assert interval is not None  # of two draws at least
    return Trace(value=value, interval=interval, **of.facts())


def spectral_density(
    model: nn.Module,
    loss_fn: Loss,
    batches: Batches,
    *,
    draws: int = 4,
    iterations: int = 60,
    points: int = 256,
    width: float | None = None,
    seed: int = 0,
    batchnorm: Policy = "eval",
) -> Spectrum:
    r"""How the Hessian's eigenvalues are distributed, by stochastic Lanczos quadrature.

    .. math:: \phi(t) = \frac{1}{n} \sum_{i=1}^{n} N(t; \lambda_i, \sigma^2)

    Args:
        model: The model.
        loss_fn: From outputs and labels to the mean loss of a batch, twice differentiable.
        batches: Inputs and labels; gone through again and again, so not a generator.
        draws: Random vectors; the intervals are over them.
        iterations: Of Lanczos for each: products with the Hessian, and vectors that are kept.
        points: Where the density is given, evenly spaced.
        width: Sigma; a hundredth of the range unless said.
        seed: Of the random vectors; they are the same on every device.
        batchnorm: What BatchNorm normalises with: "eval", "recalibrated" or "batch".

    References:
        Ghorbani, Krishnan and Xiao, An Investigation into Neural Net Optimization via Hessian
        Eigenvalue Density, ICML 2019.
    """
    check_at_least(1, draws=draws, iterations=iterations)
    check_at_least(2, points=points)
    if width is not None and not width > 0:
        raise ValueError(f"width must be positive, got {width}")
    with objective(model, loss_fn, batches, batchnorm) as of, of.at():
        draw = _normal(of, seed)
        pairs = [quadrature(of.products, draw, iterations) for _ in range(draws)]
    low, high = (f(f(nodes) for nodes, _ in pairs) for f in (min, max))
    if width is None:
        width = (high - low) / 100 or 1.0
    at = np.linspace(low - 4 * width, high + 4 * width, points)
    densities = np.stack([_smoothed(at, nodes, weights, width) for nodes, weights in pairs])
    mean = densities.mean(0)
    bounds: list[Array] = [np.empty(0), np.empty(0)]
    if draws > 1:
        half = quantile(draws - 1) * densities.std(0, ddof=1) / draws**0.5
        bounds = [np.maximum(mean - half, 0.0), mean + half]
    return Spectrum(
        at=_tuple(at),
        density=_tuple(mean),
        low=_tuple(bounds[0]),
        high=_tuple(bounds[1]),
        width=width,
        nodes=tuple(_tuple(nodes) for nodes, _ in pairs),
        weights=tuple(_tuple(weights) for _, weights in pairs),
        **of.facts(),
    )


def _smoothed(at: Array, nodes: Array, weights: Array, width: float) -> Array:
    bells = np.exp(-(((at[:, None] - nodes) / width) ** 2) / 2) / (width * (2 * np.pi) ** 0.5)
    return bells @ weights


def _tuple(values: Array) -> tuple[float, ...]:
    return tuple(values.tolist())


def _normal(of: Objective, seed: int) -> Callable[[], Tensor]:
    """Random vectors of the weights' length, in every direction alike."""
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.randn(of.size, generator=generator, dtype=of.dtype).to(of.device)


def _signs(of: Objective, seed: int) -> Callable[[int], Tensor]:
    """Rows of random signs."""
    generator = torch.Generator().manual_seed(seed)

    def signs(rows: int) -> Tensor:
        bits = torch.randint(2, (rows, of.size), generator=generator, dtype=torch.int8)
        return (2 * bits - 1).to(of.device, of.dtype)

    return signs
