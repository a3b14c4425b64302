"""Lists of tensors as one long vector: norm, inner product, copy. Nothing waits for the device."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def norm(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of all of them together, in at least float32."""
    parts = torch._foreach_norm(tensors, 2, dtype=_dtype(tensors))
    return torch.linalg.vector_norm(_gathered(list(parts)))


def inner(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """The inner product of two lists, in at least float32."""
    dtype = _dtype(left)
    products = [torch.sum(a * b, dtype=dtype) for a, b in zip(left, right, strict=True)]
    return _gathered(products).sum()


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of all of them, in one call."""
    return list(torch._foreach_mul(tensors, 1))


def safely_divided(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; 0 / 0 is 0."""
    return numerator / denominator.clamp(min=torch.finfo(denominator.dtype).tiny)


def _gathered(scalars: list[Tensor]) -> Tensor:
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars])


def _dtype(tensors: list[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, {t.dtype for t in tensors}, torch.float32)
