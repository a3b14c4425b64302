"""Student's t, which torch and numpy lack: an interval for a mean of a few draws."""

from __future__ import annotations

from collections.abc import Sequence
from math import atan, cos, pi, sin, sqrt

import numpy as np

Interval = tuple[float, float]
"""From low to high, at 95 %."""


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Where the mean lies that the values were drawn about; None for one value.

    Example:
        >>> low, high = mean_interval([1.0, 2.0, 3.0])
        >>> round(low, 3), round(high, 3)
        (-0.484, 4.484)
    """
    if len(values) < 2:
        return None
    middle = float(np.mean(values))
    half = quantile(len(values) - 1) * float(np.std(values, ddof=1)) / sqrt(len(values))
    return middle - half, middle + half


def quantile(freedom: int) -> float:
    """The t that |T| stays below with a probability of 95 %.

    Example:
        >>> round(quantile(1), 3), round(quantile(10), 3)
        (12.706, 2.228)
    """
    low, high = 0.0, 20.0
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return low


def _within(t: float, freedom: int) -> float:
    """P(|T| < t), a finite sum: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = atan(t / sqrt(freedom))
    odd = freedom % 2
    term, total = cos(angle) if odd else 1.0, 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cos(angle) ** 2 * k / (k + 1)
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
