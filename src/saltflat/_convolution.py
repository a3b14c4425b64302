"""A convolution that normalises its outputs itself: its tensors, what makes them, how it runs.

With gamma, beta, mean and var of the BatchNorm that follows, a convolution's outputs c become

    (c - mean) scale + beta,  scale = gamma / sqrt(var + eps),

which is a convolution with weight * scale and (bias - mean) scale + beta. On a GPU, cuDNN does it
together with a ReLU, and with a sum before that, in one kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saltflat._launch import aligned, blocks, has_triton
from saltflat._traced import Pair, Site

_BLOCK = 2048
_HALF = (torch.float16, torch.bfloat16)


class Folded:
    """The weight and bias of a convolution that normalises its outputs."""

    def __init__(self, pair: Pair, dtype: torch.dtype | None) -> None:
        self.pair = pair
        weight = pair.conv.weight
        # As autocast: double precision stays.
        dtype = weight.dtype if dtype is None or weight.dtype == torch.float64 else dtype
        self.weight = torch.empty_like(weight, dtype=dtype, requires_grad=False)
        self.bias = weight.new_empty(len(weight), dtype=dtype)

    def slots(self) -> list[tuple[dict[str, Any], str]]:
        """Where the module has its weight, bias, gamma, beta, mean and var, if it has them."""
        conv, norm = self.pair.conv, self.pair.norm
        return [
            *((conv._parameters, "weight"), (conv._parameters, "bias")),
            *((norm._parameters, "weight"), (norm._parameters, "bias")),
            *((norm._buffers, "running_mean"), (norm._buffers, "running_var")),
        ]

    def sources(self) -> list[Tensor | None]:
        """What is there now."""
        return [holder.get(key) for holder, key in self.slots()]

    def refresh(self) -> None:
        weight, bias, gamma, beta, mean, var = (
            t if t is None or t.dtype == torch.float64 else t.float() for t in self.sources()
        )
        assert weight is not None and mean is not None and var is not None  # as can_fold has seen
        scale = (var + self.pair.norm.eps).rsqrt()
        scale = scale if gamma is None else scale * gamma
        self.weight.copy_(weight * scale.view(-1, 1, 1, 1))
        shift = (-mean if bias is None else bias - mean) * scale
        self.bias.copy_(shift if beta is None else shift + beta)


class Refreshing:
    """All the folded tensors of a twin, made in one kernel; float32 tensors on a GPU."""

    def __init__(self, folded: list[Folded]) -> None:
        self._like = folded[0].weight
        device = self._like.device
        widest = max(len(f.weight) for f in folded)
        self._nothing = torch.zeros(widest, device=device), torch.ones(widest, device=device)
        zeros, ones = (t.data_ptr() for t in self._nothing)
        # For the bias, gamma and beta that a layer does not have.
        absent = (0, zeros, ones, zeros, 0, 0)
        rows = [
            [
                *(
                    other if t is None else t.data_ptr()
                    for t, other in zip(f.sources(), absent, strict=True)
                ),
                *(f.weight.data_ptr(), f.bias.data_ptr()),
                *(f.weight.numel(), f.weight[0].numel()),
            ]
            for f in folded
        ]
        self._aligned = aligned(address for row in rows for address in (row[0], row[6]))
        of, starts = blocks([f.weight.numel() for f in folded], _BLOCK)
        self._programs = len(of)
        self._tables = [
            *torch.tensor(rows, device=device).T.contiguous().unbind(),
            torch.tensor([f.pair.norm.eps for f in folded], dtype=torch.float32, device=device),
            torch.tensor(of, device=device),
            torch.tensor(starts, dtype=torch.int32, device=device),
        ]

    def __call__(self) -> None:
        from saltflat._kernels import fold

        with torch.cuda.device_of(self._like):
            fold[(self._programs,)](*self._tables, self._like, BLOCK=_BLOCK, ALIGNED=self._aligned)


class Convolution:
    """A folded convolution, what it adds, and the ReLU that follows, in one kernel if possible.

    Args:
        folded: Its tensors.
        site: Where it is.
        biased: Whether it adds its bias itself.
    """

    def __init__(self, folded: Folded, site: Site, *, biased: bool) -> None:
        conv = site.pair.conv
        self._weight, self._bias = folded.weight, folded.bias if biased else None
        self._relu = site.relu
        self._how: Any = (conv.stride, conv.padding, conv.dilation, conv.groups)
        self._fused = site.relu and _cudnn_takes(folded.weight, conv)

    def __call__(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        if self._fused and x.is_cuda and x.dim() == 4:
            try:
                y = self._in_one(x, other)
            except RuntimeError:  # cuDNN has no kernel for it; conv2d has, or says what is wrong
                y, self._fused = None, False
            if y is not None:
                return y
        y = F.conv2d(x, self._weight, self._bias, *self._how)
        y = y if other is None else y + other
        return y.relu_() if self._relu else y

    def _in_one(self, x: Tensor, other: Tensor | None) -> Tensor | None:
        dtype = self._weight.dtype
        if x.dtype != dtype:
            if not torch.is_autocast_enabled("cuda"):
                return None
            x = x.to(dtype)
        if other is None:
            return torch.cudnn_convolution_relu(x, self._weight, self._bias, *self._how)
        # cuDNN neither broadcasts nor promotes, and would not say so.
        if other.dtype != dtype or other.shape != self._shape(x):
            return None
        return torch.cudnn_convolution_add_relu(x, self._weight, other, 1.0, self._bias, *self._how)

    def _shape(self, x: Tensor) -> tuple[int, ...]:
        """Of the outputs."""
        strides, paddings, dilations, _ = self._how
        kernel = self._weight.shape[2:]
        sides = (
            (side + 2 * padding - dilation * (k - 1) - 1) // stride + 1
            for side, k, stride, padding, dilation in zip(
                x.shape[2:], kernel, strides, paddings, dilations, strict=True
            )
        )
        return (len(x), len(self._weight), *sides)


def _cudnn_takes(weight: Tensor, conv: nn.Conv2d) -> bool:
    """Whether cuDNN's fused convolutions are known to be right, and quick, for this one."""
    return (
        weight.is_cuda
        and torch.version.hip is None
        and torch.backends.cudnn.is_available()
        and torch.backends.cudnn.enabled
        and weight.dtype in _HALF
        and (
            weight.dtype == torch.float16 or torch.cuda.get_device_capability(weight.device)[0] >= 8
        )
        and conv.groups == 1
        and not isinstance(conv.padding, str)
    )


def in_one_kernel(folded: list[Folded]) -> bool:
    """Whether all can be made in one kernel."""
    dtype, device = folded[0].weight.dtype, folded[0].weight.device
    return (
        has_triton()
        and device.type == "cuda"
        and all(f.weight.dtype == dtype and _plain(f, device) for f in folded)
    )


def _plain(folded: Folded, device: torch.device) -> bool:
    """Whether these are runs of float32 in a GPU's memory, the weight channel after channel."""
    weight = folded.pair.conv.weight
    dense = weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)
    return (
        dense
        and weight.stride() == folded.weight.stride()
        and 0 < weight.numel() < 2**30  # offsets are int32
        and all(
            t.device == device and t.dtype == torch.float32 and (t is weight or t.is_contiguous())
            for t in folded.sources()
            if t is not None
        )
    )
