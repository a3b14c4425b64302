"""displaced: evaluate at w + e, and come back bit for bit.

The one move that SAM, sharpness and loss landscapes share.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor


class displaced:  # noqa: N801 - used as a function: with displaced(...)
    """While entered, the parameters are moved by the offsets.

    They come back from a saved copy, so exactly, in the storage they had, and also when the body
    raises. Contexts may be nested, on the same parameters too, and one context entered again.

    Args:
        parameters: Tensors to move in place.
        offsets: One for each, of its shape.

    Example:
        >>> w = torch.tensor([0.1])
        >>> with displaced([w], [torch.tensor([0.2])]):
        ...     print(w)
        tensor([0.3000])
        >>> w
        tensor([0.1000])
    """

    def __init__(self, parameters: Sequence[Tensor], offsets: Sequence[Tensor]) -> None:
        if [p.shape for p in parameters] != [e.shape for e in offsets]:
            raise ValueError(
                f"{len(offsets)} offsets do not fit {len(parameters)} parameters in number or shape"
            )
        self._parameters = list(parameters)
        self._offsets = list(offsets)
        self._saved: list[tuple[Tensor, ...]] = []

    @torch.no_grad()
    def __enter__(self) -> None:
        if self._parameters:
            # Times one: a copy of all of them in one call.
            self._saved.append(torch._foreach_mul(self._parameters, 1))
            try:
                torch._foreach_add_(self._parameters, self._offsets)
            except BaseException:
                self.__exit__()
                raise
        torch.clear_autocast_cache()  # or an enclosing autocast goes on with the weights of before

    @torch.no_grad()
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if self._saved:
            torch._foreach_copy_(self._parameters, self._saved[-1])
            self._saved.pop()
        torch.clear_autocast_cache()
