"""Many tensors averaged by a weight that lies on the device, so that a CUDA graph can repeat it.

Variances are averaged by their square roots. A weight's scale goes into its layer's outputs, so the
average of some weights that differ in scale alone makes outputs with the average of their standard
deviations, which is less than their mean variance tells.
"""

from __future__ import annotations

from itertools import compress

import torch
from torch import Tensor

from saltflat._launch import aligned, blocks, has_triton

_BLOCK = 4096
Tensors = list[Tensor] | tuple[Tensor, ...]


class Averaging:
    """v += weight (x - v) for pairs of tensors; float32 ones on a GPU in one kernel.

    Args:
        averages: The tensors v, changed in place.
        live: The tensors x, as they are laid out in memory.
        variances: Of each pair, whether it is their roots that are averaged.
        lasting: Whether these tensors stay, rather than being made for each call.
    """

    def __init__(
        self, averages: list[Tensor], live: list[Tensor], variances: list[bool], *, lasting: bool
    ) -> None:
        pairs = list(zip(averages, live, strict=True))
        self._variances = variances
        self._addresses = [(v.data_ptr(), x.data_ptr()) for v, x in pairs]
        self._kernel = lasting and has_triton() and all(_plain(v, x) for v, x in pairs)
        if not self._kernel:
            return
        sizes = [v.numel() for v in averages]
        of, starts = blocks(sizes, _BLOCK)
        tables = (*zip(*self._addresses, strict=True), sizes, variances, of, starts)
        self._programs = len(of)
        self._aligned = aligned(address for pair in self._addresses for address in pair)
        self._tables = [torch.tensor(table, device=averages[0].device) for table in tables]

    def fits(self, averages: list[Tensor], live: list[Tensor]) -> bool:
        """Whether the tensors still are where they were."""
        pairs = zip(averages, live, strict=True)
        return self._addresses == [(v.data_ptr(), x.data_ptr()) for v, x in pairs]

    def __call__(
        self, averages: list[Tensor], live: list[Tensor], weight: Tensor, known: float | None
    ) -> None:
        """Average the same tensors, or such as fit.

        Args:
            averages: The tensors v.
            live: The tensors x.
            weight: On their device, a float64 of no dimensions.
            known: Its value, unless it will be another when this is repeated.
        """
        if self._kernel:
            from saltflat._kernels import average

            with torch.cuda.device_of(weight):  # which need not be the current one
                average[(self._programs,)](
                    *self._tables, weight, BLOCK=_BLOCK, ALIGNED=self._aligned
                )
            return
        if any(self._variances):
            squares = list(compress(averages, self._variances))
            roots = torch._foreach_sqrt(squares)
            _lerp(roots, torch._foreach_sqrt(list(compress(live, self._variances))), weight, known)
            torch._foreach_copy_(squares, torch._foreach_mul(roots, roots))
            others = [not variance for variance in self._variances]
            averages, live = list(compress(averages, others)), list(compress(live, others))
        if averages:
            _lerp(averages, live, weight, known)


def _lerp(averages: Tensors, live: Tensors, weight: Tensor, known: float | None) -> None:
    if known is not None:
        torch._foreach_lerp_(averages, live, known)
    else:
        change = torch._foreach_sub(live, averages)
        torch._foreach_mul_(change, weight)
        torch._foreach_add_(averages, change)


def _plain(v: Tensor, x: Tensor) -> bool:
    """Whether a pair can be averaged as two runs of float32 in a GPU's memory."""
    return (
        v.is_cuda
        and v.device == x.device
        and v.dtype == x.dtype == torch.float32
        and v.stride() == x.stride()
        and torch.ops.aten.is_non_overlapping_and_dense(v)
    )
