"""Whether GPU kernels can be launched, and how many tensors are cut up for one launch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Whether GPU kernels can be compiled here."""
    return find_spec("triton") is not None


def blocks(sizes: list[int], block: int) -> tuple[list[int], list[int]]:
    """Tensors of these sizes cut into blocks: of each, which tensor it is of, and where it starts.

    Example:
        >>> blocks([5, 2], 4)
        ([0, 0, 1], [0, 4, 0])
    """
    pairs = [(k, start) for k, size in enumerate(sizes) for start in range(0, size, block)]
    return [k for k, _ in pairs], [start for _, start in pairs]


def aligned(addresses: Iterable[int]) -> bool:
    """Whether a GPU can load 16 bytes at once from all of them."""
    return all(address % 16 == 0 for address in addresses)
