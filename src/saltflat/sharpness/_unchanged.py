"""What a measurement changes for its own use, and puts back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Modes and buffers come back, whatever happens to them."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for holder, name, buffer, copy in buffers:
                buffer.copy_(copy)
                holder[name] = buffer


@contextmanager
def exact_float32() -> Iterator[None]:
    """Unless told otherwise cuDNN rounds float32 to 10 bits, too coarse for second derivatives."""
    cudnn: Any = torch.backends.cudnn
    setting: tuple[Any, str, Any] = cudnn, "allow_tf32", False
    try:
        before = cudnn.allow_tf32
    except RuntimeError:  # the caller uses the newer setting, beside which torch refuses this one
        setting = cudnn.conv, "fp32_precision", "ieee"
        before = cudnn.conv.fp32_precision
    setattr(*setting)
    try:
        yield
    finally:
        setattr(*setting[:2], before)
