"""One scale for surfaces that are compared: where they are cut, and their lines of equal loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_FLAT = 1e-4
"""Of the loss: what rises by less has no levels that six digits tell apart."""


@dataclass(frozen=True)
class Scale:
    """From the lowest loss of all to where the surfaces are cut."""

    bottom: float
    top: float
    levels: tuple[float, ...]
    """Of equal loss: close together where it is small; the top is the last."""

    def shade(self, losses: np.ndarray) -> np.ndarray:
        """From 0 to 1, as far from a level to the next as from that to the one after."""
        low, high = self.levels[0], self.top
        return np.asarray(np.log(np.clip(losses, low, high) / low) / np.log(high / low))


def common_scale(losses: Iterable[np.ndarray]) -> Scale:
    """The scale on which all are shown.

    Far from the weights the loss grows without end, and the steepest surface would make the others
    look flat. So the top is a round loss, above which the flattest one has a quarter of its places
    or a little more.

    Raises:
        ValueError: If no loss is a number.

    Example:
        >>> common_scale([np.linspace(0, 10, 101)])
        Scale(bottom=0.0, top=5.0, levels=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0))
    """
    finite = [found[np.isfinite(found)] for found in losses]
    finite = [found for found in finite if found.size]
    if not finite:
        raise ValueError("no loss of these surfaces is a number: make them with a smaller span")
    bottom = min(float(found.min()) for found in finite)
    top = min(float(np.quantile(found, 0.75)) for found in finite)
    if top - bottom <= _FLAT * abs(bottom):  # a plain: its levels would read the same
        top = bottom + max(1e-6, abs(bottom))
    levels = _levels(max(bottom, top / 1000), top)
    return Scale(bottom, levels[-1], levels)


def _levels(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten within a range; round numbers in equal steps if it is narrow.

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
