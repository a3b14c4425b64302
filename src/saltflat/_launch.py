"""Whether GPU kernels can be launched."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Whether GPU kernels can be compiled here."""
    return find_spec("triton") is not None
