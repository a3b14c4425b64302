"""Means, intervals and a sentence: what a few paired seeds say, and what they do not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval by Student's t."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def interval(values: list[float]) -> Interval:
    """The interval of the mean; infinite for a single value.

    Example:
        >>> interval([1.0, 2.0, 3.0])
        Interval(mean=2.0, low=-0.48..., high=4.48..., n=3)
    """
    from scipy.stats import t

    mean, n = fmean(values), len(values)
    if n == 1:
        return Interval(mean, -math.inf, math.inf, n)
    half = float(t.ppf(0.975, n - 1)) * stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def paired(values: list[float], base: list[float]) -> Interval:
    """The interval of the difference to the base, seed by seed."""
    return interval([value - other for value, other in zip(values, base, strict=True)])


def verdict(name: str, base: str, difference: Interval) -> str:
    """A sentence about a method's difference to another, in points of accuracy.

    Example:
        >>> print(verdict("saf", "base", Interval(0.5, -0.2, 1.2, 3)))
        saf: no evidence of a difference to base (+0.50 points, 95 % interval -0.20 to 1.20, n = 3)
    """
    if difference.low > 0:
        finding = f"better than {base}"
    elif difference.high < 0:
        finding = f"worse than {base}"
    else:
        finding = f"no evidence of a difference to {base}"
    return (
        f"{name}: {finding} ({difference.mean:+.2f} points, 95 % interval {difference.low:.2f} to "
        f"{difference.high:.2f}, n = {difference.n})"
    )
