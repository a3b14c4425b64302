"""The Hessian of the loss by its products with vectors: top eigenvalues, trace and spectrum."""

from __future__ import annotations

import numpy as np
from torch import nn

from saltflat.core.statistics import check_scipy, half_width, interval
from saltflat.sharpness.hutchpp import hutchpp
from saltflat.sharpness.lanczos import Array, quadrature, top_eigenpairs
from saltflat.sharpness.objective import Batches, Loss, Policy, check, open_objective
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

    "Largest" counts the sign: negative curvature is not sharp. A multiple eigenvalue may be found
    once. The iteration keeps one vector of all weights for each step.

    Args:
        model: The model.
        loss_fn: Maps outputs and labels to the mean loss of a batch, twice differentiable.
        batches: Pairs of inputs and labels; drawn once and kept where they are.
        count: Number of eigenvalues.
        tolerance: Stop when every residual is within this share of the largest |eigenvalue|.
        iterations: Stop after this number of products with the Hessian in any case.
        seed: Of the first vector, which is the same on every device.
        batchnorm: What BatchNorm normalises with: "eval", "recalibrated" or "batch".

    Returns:
        Eigenvalues and residuals; `converged` says whether the tolerance was reached.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a value is out of range, or the second derivatives are not finite.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1, bias=False)
        >>> data = [(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.zeros(2, 1))]
        >>> square = lambda out, y: ((out - y) ** 2).mean()
        >>> found = top_eigenvalues(model, square, data, count=2)  # of diag(1, 9)
        >>> [round(value, 4) for value in found.values]
        [9.0, 1.0]
    """
    check(count=count, iterations=iterations, seed=seed, tolerance=tolerance)
    if iterations < count:
        raise ValueError(f"iterations must be >= count = {count}, got {iterations}")
    with open_objective(model, loss_fn, batches, batchnorm) as objective, objective.at():
        if count > objective.size:
            raise ValueError(f"count must be <= {objective.size}, the weights, got {count}")
        values, residuals, converged = top_eigenpairs(
            objective.products, objective.normal(seed), count, tolerance, iterations
        )
    return Eigenvalues(
        values=tuple(values), residuals=tuple(residuals), converged=converged, **objective.facts()
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
        loss_fn: Maps outputs and labels to the mean loss of a batch, twice differentiable.
        batches: Pairs of inputs and labels; drawn once and kept where they are.
        hvps: Products with the Hessian to spend, a multiple of 3. The same number of vectors of
            all weights is kept.
        seed: Of the random vectors, which are the same on every device.
        batchnorm: What BatchNorm normalises with: "eval", "recalibrated" or "batch".

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1, bias=False)
        >>> data = [(torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.zeros(2, 1))]
        >>> square = lambda out, y: ((out - y) ** 2).mean()
        >>> round(hessian_trace(model, square, data).value, 4)  # of diag(1, 9)
        10.0

    References:
        Meyer, Musco, Musco and Woodruff, Hutch++: Optimal Stochastic Trace Estimation, SOSA 2021.
    """
    check(hvps=hvps, seed=seed)
    check_scipy()
    if hvps % 3:
        raise ValueError(f"hvps must be a multiple of 3, got {hvps}")
    with open_objective(model, loss_fn, batches, batchnorm) as objective, objective.at():
        mean = interval(hutchpp(objective.products, objective.signs(seed), hvps))
    return Trace(value=mean.mean, interval=mean, **objective.facts())


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
    r"""The density of the Hessian's eigenvalues, by stochastic Lanczos quadrature.

    .. math:: \phi(t) = \frac{1}{n} \sum_{i=1}^{n} N(t; \lambda_i, \sigma^2)

    Args:
        model: The model.
        loss_fn: Maps outputs and labels to the mean loss of a batch, twice differentiable.
        batches: Pairs of inputs and labels; drawn once and kept where they are.
        draws: Number of random vectors; the intervals are over them.
        iterations: Lanczos steps for each vector: products to compute and vectors to keep.
        points: Number of evenly spaced points of the density.
        width: Sigma. Default: a hundredth of the range.
        seed: Of the random vectors, which are the same on every device.
        batchnorm: What BatchNorm normalises with: "eval", "recalibrated" or "batch".

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a value is out of range, or the second derivatives are not finite.

    References:
        Ghorbani, Krishnan and Xiao, An Investigation into Neural Net Optimization via Hessian
        Eigenvalue Density, ICML 2019.
    """
    check(draws=draws, iterations=iterations, points=points, seed=seed)
    if width is not None:
        check(width=width)
    check_scipy()
    with open_objective(model, loss_fn, batches, batchnorm) as objective, objective.at():
        draw = objective.normal(seed)
        pairs = [quadrature(objective.products, draw, iterations) for _ in range(draws)]
    low, high = (f(f(nodes) for nodes, _ in pairs) for f in (min, max))
    if width is None:
        width = (high - low) / 100 or 1.0
    at = np.linspace(low - 4 * width, high + 4 * width, points)
    densities = np.stack([_smoothed(at, nodes, weights, width) for nodes, weights in pairs])
    mean = densities.mean(0)
    bounds: list[Array] = [np.empty(0), np.empty(0)]
    if draws > 1:
        half = half_width(densities)
        bounds = [np.maximum(mean - half, 0.0), mean + half]
    return Spectrum(
        at=_tuple(at),
        density=_tuple(mean),
        low=_tuple(bounds[0]),
        high=_tuple(bounds[1]),
        width=width,
        nodes=tuple(_tuple(nodes) for nodes, _ in pairs),
        weights=tuple(_tuple(weights) for _, weights in pairs),
        **objective.facts(),
    )


def _smoothed(at: Array, nodes: Array, weights: Array, width: float) -> Array:
    bells = np.exp(-(((at[:, None] - nodes) / width) ** 2) / 2) / (width * (2 * np.pi) ** 0.5)
    return bells @ weights


def _tuple(values: Array) -> tuple[float, ...]:
    return tuple(values.tolist())
