"""Scale: the loss levels that surfaces share when they are compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_FLAT = 1e-4
"""Relative rise of the loss below which six digits cannot tell levels apart."""


@dataclass(frozen=True)
class Scale:
    """The range from the lowest loss to the loss at which surfaces are cut."""

    bottom: float
    top: float
    levels: tuple[float, ...]
    """Losses of the contour lines, closer together where the loss is small; the last is the top."""

    def shade(self, losses: np.ndarray) -> np.ndarray:
        """Map losses to [0, 1] by their logarithm."""
        low, high = self.levels[0], self.top
        return np.asarray(np.log(np.clip(losses, low, high) / low) / np.log(high / low))


def common_scale(losses: Iterable[np.ndarray]) -> Scale:
    """Choose one scale for several surfaces.

    The loss grows without bound far from the weights, so the steepest surface would make all others
    look flat. The top is therefore a round loss, at most the lowest upper quartile of a surface.

    Raises:
        ValueError: If no loss is finite.

    Example:
        >>> common_scale([np.linspace(0, 10, 101)])
        Scale(bottom=0.0, top=5.0, levels=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0))
    """
    finite = [found[np.isfinite(found)] for found in losses]
    finite = [found for found in finite if found.size]
    if not finite:
        raise ValueError("losses must hold a finite number, got none: use a smaller span")
    bottom = min(float(found.min()) for found in finite)
    top = min(float(np.quantile(found, 0.75)) for found in finite)
    if top - bottom <= _FLAT * abs(bottom):  # flat: its levels would print the same
        top = bottom + max(1e-6, abs(bottom))
    levels = _levels(max(bottom, top / 1000), top)
    return Scale(bottom, levels[-1], levels)


def _levels(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten within a range; equal steps if the range is narrow.

    Example:
        >>> _levels(0.3, 30)
        (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
        >>> _levels(2.6, 3.35)
        (2.6, 2.7, 2.8, 2.9, 3.0, 3.1, 3.2, 3.3)
    """
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    found = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    inside = tuple(level for level in found if low <= level <= high)
    if len(inside) > 4:
        return inside
    rough = (high - low) / 8
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough)
    first, last = np.ceil(low / step - 1e-9), np.floor(high / step + 1e-9)
    return tuple(float(f"{n * step:.6g}") for n in np.arange(first, last + 1))
