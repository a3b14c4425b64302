"""frozen_running_stats: a forward pass in training mode that keeps BatchNorm's statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def running_layers(model: nn.Module) -> list[Any]:
    """BatchNorm, and other layers with a running mean."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        or isinstance(getattr(module, "running_mean", None), Tensor)
    ]


class frozen_running_stats:  # noqa: N801 - used as a function: with frozen_running_stats(model)
    """Inside, layers normalise as in training but do not update their running statistics.

    BatchNorm stops tracking, which costs nothing and leaves `momentum` and `num_batches_tracked`
    alone. Other layers get their statistics back from a copy. Contexts may be nested, and one
    context may be entered again.

    Args:
        model: The model with the layers, or None.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._entered: list[tuple[list[tuple[Any, bool]], list[tuple[Tensor, Tensor]]]] = []

    @torch.no_grad()
    def __enter__(self) -> None:
        flags: list[tuple[Any, bool]] = []
        copies: list[tuple[Tensor, Tensor]] = []
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
    def __exit__(self, *error: object) -> None:
        flags, copies = self._entered[-1]
        for module, flag in flags:
            module.track_running_stats = flag
        for buffer, copy in copies:
            buffer.copy_(copy)
        self._entered.pop()
