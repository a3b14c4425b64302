"""Checks of arguments, made once, where an object is built."""

from __future__ import annotations

import operator
from math import inf, isfinite, nan
from numbers import Real
from typing import Any


def flag(name: str, value: Any) -> bool:
    """`value` as a bool.

    Raises:
        ValueError: If it is something else.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def whole_number(name: str, value: Any, least: int = 0, most: int = 2**31 - 1) -> int:
    """`value` as an int.

    Raises:
        ValueError: If it is not a whole number from `least` to `most`.

    Example:
        >>> whole_number("lag", 3, least=1)
        3
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {value!r}")
    return number


def real_number(
    name: str, value: Any, least: float = 0.0, most: float = inf, *, above: bool = False
) -> float:
    """`value` as a finite float.

    Args:
        name: The argument's name.
        value: What was given.
        least: The smallest number allowed.
        most: The largest number allowed.
        above: Whether the number must be larger than `least`.

    Raises:
        ValueError: If it is not a finite number from `least` to `most`.

    Example:
        >>> real_number("weight", 1)
        1.0
    """
    try:
        number = nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = inf
    if not isfinite(number) or not least <= number <= most or (above and number == least):
        bounds = f"{'above' if above else 'of at least'} {least:g}"
        bounds += f" and at most {most:g}" if most < inf else ""
        raise ValueError(f"{name} must be a finite number {bounds}, got {value!r}")
    return number
