"""Lists of tensors as one long vector: norm, inner product, copy. Nothing waits for the device.

Of tensors that are sharded over ranks each rank computes with its part, and norms and products are
those of the whole.
"""

from __future__ import annotations

from functools import reduce
from itertools import accumulate

import torch
from torch import Tensor

from saltflat.core.distributed import local, sharded, summed
from saltflat.core.perturb import add_scaled_


def norm(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of all of them together, in at least float32."""
    parts = torch._foreach_norm(local(tensors), 2, dtype=_dtype(tensors))
    length = torch.linalg.vector_norm(_gathered(list(parts)))
    return summed(length**2, tensors).sqrt() if sharded(tensors) else length


def inner(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """The inner product of two lists, in at least float32."""
    dtype = _dtype(left)
    mine, theirs = local(left), local(right)
    places: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(mine):
        places.setdefault(tensor.device, []).append(i)
    sums = []
    for device, numbers in places.items():
        # One long vector and one sum: a few launches, where a sum for each would be hundreds.
        ends = list(accumulate(mine[i].numel() for i in numbers))
        whole = torch.empty(ends[-1], dtype=dtype, device=device)
        parts = [
            part.as_strided(mine[i].shape, _dense_stride(mine[i]))
            for i, part in zip(numbers, whole.tensor_split(ends[:-1]), strict=True)
        ]
        torch._foreach_copy_(parts, [mine[i] for i in numbers])
        torch._foreach_mul_(parts, [theirs[i].to(dtype) for i in numbers])
        sums.append(whole.sum())
    total = _gathered(sums).sum()
    return summed(total, left) if sharded(left) else total


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of all of them, in one call."""
    return list(torch._foreach_mul(tensors, 1))


def add_(tensors: list[Tensor], others: list[Tensor], factor: Tensor) -> None:
    """tensors += factor * others in place, of whichever devices and dtypes they are."""
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for tensor, other in zip(local(tensors), local(others), strict=True):
        mine, theirs = alike.setdefault((tensor.device, tensor.dtype), ([], []))
        mine.append(tensor)
        theirs.append(other)
    for mine, theirs in alike.values():
        add_scaled_(mine, theirs, factor)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; 0 where the denominator is 0."""
    return torch.where(denominator == 0, 0.0, numerator / denominator)


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides, or those it would have without gaps and overlaps."""
    return torch.empty_like(tensor, device="meta").stride()


def _gathered(scalars: list[Tensor]) -> Tensor:
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars])


def _dtype(tensors: list[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, {t.dtype for t in tensors}, torch.float32)
