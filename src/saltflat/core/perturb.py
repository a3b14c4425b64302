"""displaced: evaluate at w + e, and return to exactly w."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saltflat.core.distributed import local


class displaced:  # noqa: N801 - used as a function: with displaced(...)
    """Add offsets to the parameters inside the context.

    On exit a saved copy is written back, also when the body raises. So the parameters return
    exactly, in the same storage. Contexts may be nested, and one context may be entered again.

    Args:
        parameters: Tensors to move in place. Of a sharded one, each rank moves its part.
        offsets: One for each parameter, of its shape; of a sharded one, this rank's part will do.

    Raises:
        ValueError: If number or shapes differ.

    Example:
        >>> w = torch.tensor([0.1])
        >>> with displaced([w], [torch.tensor([0.2])]):
        ...     print(w)
        tensor([0.3000])
        >>> w
        tensor([0.1000])
    """

    def __init__(self, parameters: Sequence[Tensor], offsets: Sequence[Tensor]) -> None:
        self._parameters, self._offsets = list(parameters), list(offsets)
        if [p.shape for p in local(parameters)] != [e.shape for e in local(offsets)]:
            raise ValueError(
                f"offsets must fit the parameters in number and shape, got {len(self._offsets)} "
                f"for {len(self._parameters)}"
            )
        self._saved: list[tuple[list[Tensor], tuple[Tensor, ...]]] = []
        self._versions: list[int] = []

    @torch.no_grad()
    def __enter__(self) -> None:
        if self._parameters:
            parameters = local(self._parameters)
            self._saved.append((parameters, torch._foreach_mul(parameters, 1)))  # one fused copy
            try:
                torch._foreach_add_(parameters, local(self._offsets))
            except BaseException:
                self.__exit__()
                raise
            self._versions = [p._version for p in parameters]
        torch.clear_autocast_cache()  # it holds casts of the weights from before

    def overwritten(self) -> bool:
        """Whether anything wrote to the parameters after the last enter, which exit will undo."""
        return bool(self._saved) and self._versions != [p._version for p in self._saved[-1][0]]

    @torch.no_grad()
    def __exit__(self, *error: object) -> None:
        if self._saved:
            torch._foreach_copy_(*self._saved[-1])
            self._saved.pop()
        torch.clear_autocast_cache()
