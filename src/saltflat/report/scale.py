"""One scale for surfaces that are compared: where they are cut, and their lines of equal loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Scale:
    """From the lowest loss of all to where the surfaces are cut."""

    bottom: float
    top: float
    levels: tuple[float, ...]
    """1, 2, 5, 10, ...: close together where the loss is small; the top is the last."""

    def shade(self, losses: NDArray[np.float64]) -> NDArray[np.float64]:
        """From 0 to 1, equally far from level to level."""
        low, high = self.levels[0], self.levels[-1]
        inside = np.clip(losses, low, high)
        return np.log(inside / low) / np.log(high / low)


def common_scale(surfaces: Sequence[NDArray[np.float64]]) -> Scale:
    """The scale on which all are shown.

    Far from the weights the loss grows without end, and the steepest surface would make the others
    look flat. So the top is the last level that half of the flattest one's points reach.

    Example:
        >>> common_scale([np.linspace(0, 10, 101)]).levels
        (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    """
    finite = [surface[np.isfinite(surface)] for surface in surfaces]
    finite = [values for values in finite if values.size]
    if not finite:
        raise ValueError("the landscapes hold no finite loss: make them with a smaller span")
    bottom = min(float(values.min()) for values in finite)
    top = min(float(np.median(values)) for values in finite)
    if not top > bottom:  # a plain
        top = bottom + max(1e-6, abs(bottom))
    levels = round_levels(max(bottom, top / 1000), top)
    return Scale(bottom, levels[-1], levels)


def round_levels(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten within a range; of a narrow one, its ends.

    Example:
        >>> round_levels(0.3, 6)
        (0.5, 1.0, 2.0, 5.0)
    """
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    found = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    inside = tuple(level for level in found if low <= level <= high)
    return inside if len(inside) > 1 else (low, high)


def logarithmic(values: NDArray[np.float64]) -> bool:
    """Whether figures range so far that only a logarithmic axis shows them all."""
    return bool(np.all(values > 0) and values.max() > 30 * values.min())
