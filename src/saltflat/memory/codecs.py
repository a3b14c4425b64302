"""How one row of logits is stored: float32, float16 or uint8.

A codec turns (rows, classes) float32 logits into (rows, width) of its own dtype and back. Finite
logits always come back finite. A row is self-contained, so that gathering, scattering, saving or
sending the stored form moves everything that belongs to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIMIT = torch.finfo(torch.float16).max
"""Lossy codecs saturate here; a softmax that sees such logits is one-hot at any temperature."""


class Codec:
    """One way to store a row of logits; this one as it is, in float32."""

    dtype = torch.float32

    @staticmethod
    def width(num_classes: int) -> int:
        """Elements of `dtype` in a stored row."""
        return num_classes

    @staticmethod
    def encode(logits: Tensor) -> Tensor:
        """The stored form of finite float32 logits."""
        return logits

    @staticmethod
    def decode(stored: Tensor) -> Tensor:
        """Logits from their stored form, in a floating-point dtype."""
        return stored


class Float16(Codec):
    """Half the bytes, eleven significant bits."""

    dtype = torch.float16

    @staticmethod
    def encode(logits: Tensor) -> Tensor:
        return logits.to(torch.float16).clamp_(-_LIMIT, _LIMIT)  # infinity becomes the limit


class UInt8(Codec):
    """A quarter of the bytes: 256 even steps between the row's least and greatest logit.

    Eight bytes behind the codes hold the row's least logit and its step as two float32.

    Example:
        >>> import torch
        >>> stored = UInt8.encode(torch.tensor([[-1.0, 0.0, 254.0]]))
        >>> stored[0, :3]
        tensor([  0,   1, 255], dtype=torch.uint8)
        >>> UInt8.decode(stored)
        tensor([[ -1.,   0., 254.]])
    """

    dtype = torch.uint8

    @staticmethod
    def width(num_classes: int) -> int:
        return num_classes + 8

    @staticmethod
    def encode(logits: Tensor) -> Tensor:
        logits = logits.clamp(-_LIMIT, _LIMIT)
        low, high = torch.aminmax(logits, dim=-1, keepdim=True)
        step = (high - low) / 255
        # A row of equal logits has step 0, and codes 0 / tiny = 0.
        tiny = torch.finfo(torch.float32).tiny
        codes = ((logits - low) / step.clamp(min=tiny)).round().to(torch.uint8)
        return torch.cat([codes, torch.cat([low, step], -1).view(torch.uint8)], -1)

    @staticmethod
    def decode(stored: Tensor) -> Tensor:
        # A view as float32 needs aligned memory, which only a copy has.
        header = stored[..., -8:].clone(memory_format=torch.contiguous_format)
        low_and_step = header.view(torch.float32)
        return torch.addcmul(low_and_step[..., :1], low_and_step[..., 1:], stored[..., :-8])


CODECS: dict[str, type[Codec]] = {"float32": Codec, "float16": Float16, "uint8": UInt8}


def codec_for(storage: str) -> type[Codec]:
    """The codec called `storage`.

    Raises:
        ValueError: If there is none of that name.
    """
    if not isinstance(storage, str) or storage not in CODECS:
        raise ValueError(f"storage must be one of {', '.join(CODECS)}, got {storage!r}")
    return CODECS[storage]
