"""An inference twin of a module: convolutions that normalise their outputs themselves.

Their weights are rounded once, to what autocast would round them to in every forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from saltflat._convolution import Convolution, Folded, Refreshing, in_one_kernel
from saltflat._traced import Program, can_fold
from saltflat.core.cuda_graph import capturing


class Folding:
    """When a module's twin can stand in for it, and when it must follow it.

    Args:
        module: In eval mode. Is not changed.

    Raises:
        ValueError: If it has no twin; says why.
    """

    def __init__(self, module: nn.Module) -> None:
        self._program = Program(module)
        self._twin: _Twin | None = None
        self._stale = False

    def twin(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: Any) -> _Twin | None:
        """What gives the module's outputs for these inputs, unless that is the module alone."""
        if torch.compiler.is_compiling() or len(inputs) != 1 or kwargs:
            return None
        (x,) = inputs
        if type(x) is not Tensor or not self._program.describes(module):
            return None
        dtype = _autocast_dtype(x.device)
        if self._twin is not None and self._twin.in_place():
            if self._twin.dtype == dtype:
                return self._for(x)
            if self._twin.captured:
                return None  # a CUDA graph will go on to use its memory
        if capturing() or not all(can_fold(site.pair) for site in self._program.sites):
            return None  # what is made now would belong to the graph
        with torch.inference_mode(False):  # or nothing outside of that could change the twin
            self._twin = _Twin(self._program, dtype)
        self._stale = True
        return self._for(x)

    @property
    def nbytes(self) -> int:
        """Bytes of the twin's own tensors; 0 before there is one."""
        return 0 if self._twin is None else self._twin.nbytes

    def outdate(self) -> None:
        """Say that the tensors may have changed: the next pass folds them again."""
        self._stale = True

    def _for(self, x: Tensor) -> _Twin | None:
        """The twin, up to date where the current stream is."""
        twin = self._twin
        if twin is None or x.device != twin.device:
            return None
        if capturing():
            twin.captured = True
            twin.refresh()  # in every replay: each may follow a change
        elif self._stale or twin.versions != twin.versions_now():
            twin.refresh()
            twin.versions = twin.versions_now()
            self._stale = False
        else:
            twin.wait()
        return twin


class _Twin:
    """A program and its folded tensors, for one precision.

    Args:
        program: What to run.
        dtype: What autocast makes of weights; None without it.
    """

    def __init__(self, program: Program, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.captured = False
        self.versions: list[int] = []
        self._program = program
        folded = {site.pair: Folded(site.pair, dtype) for site in program.sites}
        self._folded = list(folded.values())
        added = {site.summand for site in program.sites}
        self._convolutions: list[Callable[..., Tensor]] = [
            Convolution(folded[site.pair], site, biased=i not in added)
            for i, site in enumerate(program.sites)
        ]
        # What is added has its bias added where the sum is, because that costs nothing there.
        sums = [
            (site, program.sites[site.summand])
            for site in program.sites
            if site.summand is not None
        ]
        self._biases = [folded[site.pair].bias for site, _ in sums]
        self._added_biases = [folded[other.pair].bias for _, other in sums]
        self.device = self._folded[0].weight.device
        self._slots = [slot for folded in self._folded for slot in folded.slots()]
        self._places = self._places_now()
        self._refreshing = Refreshing(self._folded) if in_one_kernel(self._folded) else None
        self._refreshed = torch.cuda.Event() if self.device.type == "cuda" else None

    def __call__(self, x: Tensor) -> Any:
        return self._program(self._convolutions, x)

    def refresh(self) -> None:
        """Fold the module's tensors as they are now, into the same memory."""
        if self._refreshing is not None:
            self._refreshing()
        else:
            for folded in self._folded:
                folded.refresh()
        if self._biases:
            torch._foreach_add_(self._biases, self._added_biases)
        if self._refreshed is not None and not capturing():
            self._refreshed.record(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        """Let the current stream wait for the last refresh, which may have been on another."""
        if self._refreshed is not None:
            self._refreshed.wait(torch.cuda.current_stream(self.device))

    @property
    def nbytes(self) -> int:
        return sum(folded.weight.nbytes + folded.bias.nbytes for folded in self._folded)

    def in_place(self) -> bool:
        """Whether the module's tensors are where they were."""
        return self._places == self._places_now()

    def versions_now(self) -> list[int]:
        """How often PyTorch has changed each of the module's tensors."""
        sources = [holder.get(key) for holder, key in self._slots]
        return [0 if t is None or t.is_inference() else t._version for t in sources]

    def _places_now(self) -> list[Any]:
        sources = [holder.get(key) for holder, key in self._slots]
        addresses = [0 if t is None else t.data_ptr() for t in sources]
        return [*addresses, *((w.dtype, w.stride()) for w in sources[::6] if w is not None)]


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast makes of a convolution's weight here; None where it does not."""
    if not torch.amp.is_autocast_available(device.type):
        return None
    enabled = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else None
