"""frozen_running_stats: a forward pass in training mode that leaves no trace in BatchNorm."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


def running_layers(model: nn.Module) -> list[Any]:
    """Layers that normalise a batch with its own statistics in training: BatchNorm, and others
    that keep a running mean."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        or isinstance(getattr(module, "running_mean", None), Tensor)
    ]


class frozen_running_stats:  # noqa: N801 - used as a function: with frozen_running_stats(model)
    """While entered, normalisation layers normalise as in training but keep their statistics.

    BatchNorm is told not to track them, which costs nothing and leaves `momentum` (None included)
    and `num_batches_tracked` alone. Other layers with running statistics get them back from a
    copy. Contexts may be nested, and one context entered again.

    Args:
        model: The model whose layers are meant; None: none.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._entered: list[tuple[_Flags, _Copies]] = []

    @torch.no_grad()
    def __enter__(self) -> None:
        flags: _Flags = []
        copies: _Copies = []
        for module in () if self._model is None else running_layers(self._model):
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                flags.append((module, module.track_running_stats))
            else:
                copies += [(b, b.clone()) for b in module.buffers(recurse=False)]
        self._entered.append((flags, copies))
        try:
            for module, _ in flags:
                module.track_running_stats = False
        except BaseException:
            self.__exit__()
            raise

    @torch.no_grad()
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        flags, copies = self._entered[-1]
        for module, flag in flags:
            module.track_running_stats = flag
        for buffer, copy in copies:
            buffer.copy_(copy)
        self._entered.pop()


_Flags = list[tuple[Any, bool]]
_Copies = list[tuple[Tensor, Tensor]]
