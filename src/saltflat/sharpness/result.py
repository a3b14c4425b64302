"""Results: the figure, and everything it depends on."""

from __future__ import annotations

from dataclasses import dataclass

from saltflat.core.statistics import Interval
from saltflat.sharpness.objective import Policy


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How a figure was measured."""

    batchnorm: Policy
    images: int
    """Rows that were measured."""
    forward: float
    """Forward passes over the images."""
    backward: float
    """Backward passes over the images."""
    hvps: int
    """Products of the Hessian with a vector; several may share a forward and a backward pass."""


@dataclass(frozen=True, kw_only=True)
class Sharpness(Measured):
    """How much the loss rises near the weights."""

    value: float
    rho: float
    interval: Interval | None = None
    """Over the random draws, if the value is their mean."""


@dataclass(frozen=True, kw_only=True)
class Eigenvalues(Measured):
    """The Hessian's largest eigenvalues, in falling order."""

    values: tuple[float, ...]
    residuals: tuple[float, ...]
    """|H v - value v| of each, a bound on its error."""
    converged: bool
    """Whether each residual is within the tolerance."""


@dataclass(frozen=True, kw_only=True)
class Trace(Measured):
    """The sum of the Hessian's eigenvalues."""

    value: float
    interval: Interval
    """Over the random vectors."""


@dataclass(frozen=True, kw_only=True)
class Spectrum(Measured):
    """The density of the Hessian's eigenvalues; it integrates to 1."""

    at: tuple[float, ...]
    density: tuple[float, ...]
    low: tuple[float, ...]
    """With `high`, the 95 % interval at each point, over the random vectors; empty for one."""
    high: tuple[float, ...]
    width: float
    """Standard deviation of the Gaussian that represents an eigenvalue."""
    nodes: tuple[tuple[float, ...], ...]
    """The quadrature of each random vector; the density is made of nodes and weights."""
    weights: tuple[tuple[float, ...], ...]
    """One for each node; they sum to 1 for each random vector."""
