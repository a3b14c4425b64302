"""The 95 % interval of a mean, and the verdict that a paired interval supports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval by Student's t.

    Example:
        >>> print(interval([1.0, 2.0, 3.0]), "and", interval([1.0]))
        2.00 [-0.48, 4.48] and 1.00 (n = 1)
    """

    mean: float
    low: float
    """NaN for a single value, as is `high`."""
    high: float
    n: int

    def __format__(self, spec: str) -> str:
        spec = spec or ".2f"
        ends = f"[{self.low:{spec}}, {self.high:{spec}}]" if self.n > 1 else "(n = 1)"
        return f"{self.mean:{spec}} {ends}"

    def __str__(self) -> str:
        return format(self)


def interval(values: Sequence[float]) -> Interval:
    """Estimate the mean of the distribution that the values were drawn from.

    The mean and the interval are NaN if a value is not finite.

    Raises:
        ValueError: If values is empty.

    Example:
        >>> interval([1.0, 2.0, 3.0])
        Interval(mean=2.0, low=-0.48..., high=4.48..., n=3)
    """
    n = len(values)
    if n == 0:
        raise ValueError("values must not be empty, got []")
    mean = fmean(values) if all(map(math.isfinite, values)) else math.nan
    if n == 1 or math.isnan(mean):
        return Interval(mean, math.nan, math.nan, n)
    half = float(half_width(values))
    return Interval(mean, mean - half, mean + half, n)


def paired(values: Sequence[float], base: Sequence[float]) -> Interval:
    """The interval of the difference to the base, pair by pair."""
    return interval([value - other for value, other in zip(values, base, strict=True)])


def half_width(draws: ArrayLike) -> NDArray[np.float64]:
    """Half the width of the interval of the mean over the first axis, of two draws or more."""
    check_scipy()
    from scipy.stats import t

    draws = np.asarray(draws, dtype=np.float64)
    n = len(draws)
    return t.ppf(0.975, n - 1) * draws.std(0, ddof=1) / math.sqrt(n)


def check_scipy() -> None:
    """Raise ImportError if scipy is missing; call this before long work."""
    if find_spec("scipy") is None:
        raise ImportError("intervals need scipy: pip install 'saltflat[sharpness]'")


def verdict(name: str, base: str, difference: Interval) -> str:
    """A sentence about a method's difference to another, in points of accuracy.

    Example:
        >>> print(verdict("saf", "base", Interval(0.5, -0.2, 1.2, 3)))
        saf: no evidence of a difference to base (+0.50 points, 95 % interval -0.20 to 1.20, n = 3)
    """
    points = f"{difference.mean:+.2f} points"
    if difference.n == 1:
        return f"{name}: one seed cannot show a difference to {base} ({points}, n = 1)"
    if difference.low > 0:
        finding = f"better than {base}"
    elif difference.high < 0:
        finding = f"worse than {base}"
    else:
        finding = f"no evidence of a difference to {base}"
    ends = f"{difference.low:.2f} to {difference.high:.2f}"
    return f"{name}: {finding} ({points}, 95 % interval {ends}, n = {difference.n})"
