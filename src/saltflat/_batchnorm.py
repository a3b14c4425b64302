"""frozen_running_stats: a forward pass in training mode that leaves no trace in BatchNorm."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


class frozen_running_stats:  # noqa: N801 - used as a function: with frozen_running_stats(model)
    """While entered, normalisation layers normalise as in training but keep their statistics.

    BatchNorm is told not to track them, which costs nothing and leaves `momentum` (None included)
    and `num_batches_tracked` alone. Other layers with running statistics get them back from a
    copy. Contexts may be nested, and one context entered again.

    Args:
        model: The model whose layers are meant; None: none.
    """

    def __init__(self, model: nn.Module | None) -> None:
        modules = [] if model is None else list(model.modules())
        self._batchnorms = [m for m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._others = [
            m
            for m in modules
            if not isinstance(m, nn.modules.batchnorm._BatchNorm)
            and isinstance(getattr(m, "running_mean", None), Tensor)
        ]
        self._entered: list[tuple[list[bool], list[dict[str, Any]]]] = []

    @torch.no_grad()
    def __enter__(self) -> None:
        flags = [module.track_running_stats for module in self._batchnorms]
        # Only in training do they track; in evaluation the flag chooses which statistics are used.
        for module in self._batchnorms:
            module.track_running_stats = module.track_running_stats and not module.training
        copies = [
            {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}
            for module in self._others
        ]
        self._entered.append((flags, copies))

    @torch.no_grad()
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        flags, copies = self._entered.pop()
        for module, flag in zip(self._batchnorms, flags, strict=True):
            module.track_running_stats = flag
        for other, buffers in zip(self._others, copies, strict=True):
            for name, buffer in buffers.items():
                getattr(other, name).copy_(buffer)
