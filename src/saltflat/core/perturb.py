"""displaced: evaluate at w + e, and come back bit for bit.

The one move that SAM, sharpness and loss landscapes share.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from saltflat.core.distributed import local


class displaced:  # noqa: N801 - used as a function: with displaced(...)
    """While entered, the parameters are moved by the offsets, or by factors times these.

    They come back from a saved copy, so exactly, in the storage they had, and also when the body
    raises. Contexts may be nested, on the same parameters too, and one context entered again.

    Args:
        parameters: Tensors to move in place; of sharded ones, each rank moves its part.
        offsets: One for each, of its shape.
        factors: A tensor of no dimensions for each, or none: all 1.

    Example:
        >>> w = torch.tensor([0.1])
        >>> with displaced([w], [torch.tensor([0.2])]):
        ...     print(w)
        tensor([0.3000])
        >>> w
        tensor([0.1000])
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        offsets: Sequence[Tensor],
        factors: Sequence[Tensor] = (),
    ) -> None:
        if [p.shape for p in parameters] != [e.shape for e in offsets]:
            raise ValueError(
                f"{len(offsets)} offsets do not fit {len(parameters)} parameters in number or shape"
            )
        self._parameters = list(parameters)
        self._offsets = list(offsets)
        self._factors = list(factors)
        self._saved: list[tuple[list[Tensor], tuple[Tensor, ...]]] = []

    @torch.no_grad()
    def __enter__(self) -> None:
        if self._parameters:
            # Times one: a copy of all of them in one call.
            parameters, offsets = local(self._parameters), local(self._offsets)
            self._saved.append((parameters, torch._foreach_mul(parameters, 1)))
            try:
                if self._factors:
                    self._move(parameters, offsets)
                else:
                    torch._foreach_add_(parameters, offsets)
            except BaseException:
                self.__exit__()
                raise
        torch.clear_autocast_cache()  # or an enclosing autocast goes on with the weights of before

    def _move(self, parameters: list[Tensor], offsets: list[Tensor]) -> None:
        alike: dict[tuple[int, torch.device, torch.dtype], list[int]] = {}
        for i, (parameter, factor) in enumerate(zip(parameters, self._factors, strict=True)):
            alike.setdefault((id(factor), parameter.device, parameter.dtype), []).append(i)
        for numbers in alike.values():
            add_scaled_(
                [parameters[i] for i in numbers],
                [offsets[i] for i in numbers],
                self._factors[numbers[0]],
            )

    @torch.no_grad()
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if self._saved:
            torch._foreach_copy_(*self._saved[-1])
            self._saved.pop()
        torch.clear_autocast_cache()


def add_scaled_(tensors: list[Tensor], others: list[Tensor], factor: Tensor) -> None:
    """tensors += factor * others, all of one device and dtype; on a GPU in one pass if possible."""
    factor = factor.to(tensors[0].device)
    if tensors[0].is_cuda and all(_alike(a, b) for a, b in zip(tensors, others, strict=True)):
        # A step of SGD is just that, with a learning rate that may lie on the device.
        torch._fused_sgd_(
            tensors,
            others,
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=-factor.to(torch.float32),
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
        torch.autograd.graph.increment_version(tensors)  # which it does not do itself
    else:
        torch._foreach_add_(tensors, torch._foreach_mul(others, factor))


def _alike(tensor: Tensor, other: Tensor) -> bool:
    return (
        tensor.dtype == other.dtype != torch.float64
        and tensor.stride() == other.stride()
        and torch.ops.aten.is_non_overlapping_and_dense(tensor)
    )
