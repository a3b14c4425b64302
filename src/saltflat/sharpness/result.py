"""What a measurement gives: the figure, and all that it depends on."""

from __future__ import annotations

from dataclasses import dataclass

from saltflat.sharpness._interval import Interval
from saltflat.sharpness._objective import Policy


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How something was measured."""

    batchnorm: Policy
    images: int
    """Rows that were measured."""
    forward: float
    """Forward passes over the images."""
    backward: float
    """Backward passes over them."""
    hvps: int
    """Products of the Hessian with a vector; several may share a forward and a backward pass."""


@dataclass(frozen=True, kw_only=True)
class Sharpness(Measured):
    """By how much the loss rises near the weights."""

    value: float
    rho: float
    interval: Interval | None = None
    """At 95 %, where the value is the mean of random draws."""


@dataclass(frozen=True, kw_only=True)
class Eigenvalues(Measured):
    """The largest of the Hessian, in falling order."""

    values: tuple[float, ...]
    residuals: tuple[float, ...]
    """|H v - value v| of each: an eigenvalue is no further than this."""
    converged: bool
    """Whether each residual is within the tolerance."""


@dataclass(frozen=True, kw_only=True)
class Trace(Measured):
    """The sum of the Hessian's eigenvalues."""

    value: float
    interval: Interval
    """At 95 %, over the random vectors."""


@dataclass(frozen=True, kw_only=True)
class Spectrum(Measured):
    """How the Hessian's eigenvalues are distributed; the density integrates to 1."""

    at: tuple[float, ...]
    density: tuple[float, ...]
    low: tuple[float, ...]
    """With `high`, at 95 % at each point, over the random vectors; both empty for one vector."""
    high: tuple[float, ...]
    width: float
    """The deviation of the Gaussian that stands for an eigenvalue."""
    nodes: tuple[tuple[float, ...], ...]
    """Of each random vector's quadrature, with `weights`, which sum to 1: what the density is
    made of."""
    weights: tuple[tuple[float, ...], ...]
