"""Which tensor of a model goes into which of its teacher's, and how."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from saltflat._average import Averaging
from saltflat.core.distributed import local

LOW_PRECISION = (torch.float16, torch.bfloat16)
"""What an average that moves by 1 - decay a step cannot be kept in."""


class Plan:
    """Which tensor of a model goes into which of its teacher's, and how.

    Walking two module trees takes longer than the update itself, so it is done once. What is kept
    are the dictionaries that hold the tensors, because a module may replace a tensor at any time.

    Args:
        teacher: The averaged module.
        precise: The float32 averages of its half-precision tensors, as buffers.
        which: Of the teacher's tensors, those that are averaged; the others are copied.
        model: What is averaged.
        deviations: Whether variances are averaged by their roots.

    Raises:
        ValueError: If the two do not have the same tensors.
    """

    def __init__(
        self,
        teacher: nn.Module,
        precise: nn.Module,
        which: Tensor,
        model: nn.Module,
        *,
        deviations: bool,
    ) -> None:
        self.model = weakref.ref(model)
        self.weight = torch.zeros((), dtype=torch.float64)
        self._averaging: Averaging | None = None
        ours, theirs, finer = (slots(module) for module in (teacher, model, precise))
        if problem := _mismatch(ours, theirs) or _too_coarse(ours, finer):
            raise ValueError(f"the model is not the one this teacher was made from: {problem}")
        self._owned = [*ours.values(), *finer.values()]
        buffers = dict.fromkeys(name for name, _ in teacher.named_buffers() if name in ours)
        self._buffers = [ours[name] for name in buffers]
        self._buffers += [finer[flat(name)] for name in buffers if flat(name) in finer]
        self._averaged: list[tuple[Slot, Slot]] = []
        self._variances: list[bool] = []
        """Of what is averaged, whether it is by roots."""
        self._copied: list[tuple[Slot, Slot]] = []
        for (name, slot), averaged in zip(ours.items(), which.tolist(), strict=True):
            average = finer.get(flat(name), slot)
            if averaged:
                self._averaged.append((average, theirs[name]))
                self._variances.append(deviations and name in buffers and slot[1] == "running_var")
                if average is not slot:
                    self._copied.append((slot, average))
            else:
                self._copied.append((slot, theirs[name]))

    def prepare(self, averages: list[Tensor], live: list[Tensor]) -> None:
        """Note where the tensors are, if they are not where they were."""
        if self._averaging is None or not self._averaging.fits(averages, live):
            # A cast makes new tensors, whose addresses a kernel could not keep.
            casts = any(x is not y for x, y in zip(live, self._live(), strict=True))
            self._averaging = Averaging(averages, live, self._variances, lasting=not casts)
            self.weight = self.weight.to(averages[0].device)

    def average(self, averages: list[Tensor], live: list[Tensor], known: float | None) -> None:
        """Average by the weight that was set, whose value is known unless this is captured."""
        if self._averaging is None:
            raise RuntimeError("update the teacher once before its update is captured or replayed")
        self._averaging(averages, live, self.weight, known)

    def averaged(self) -> tuple[list[Tensor], list[Tensor]]:
        """Averages and the live tensors that go into them, in the averages' precision."""
        averages = local(holder[key] for (holder, key), _ in self._averaged)
        return averages, [
            x if x.dtype == average.dtype else x.to(average.dtype)
            for average, x in zip(averages, self._live(), strict=True)
        ]

    def _live(self) -> list[Tensor]:
        return local(holder[key] for _, (holder, key) in self._averaged)

    def owned(self, *, buffers: bool) -> list[Tensor]:
        """The teacher's own tensors, or those of them that are buffers of the model."""
        return [holder[key] for holder, key in (self._buffers if buffers else self._owned)]

    def copy(self) -> None:
        """Make the plain copies, after the average: one launch for all of the same kind."""
        kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for (to, key), (source, source_key) in self._copied:
            target, new = local([to[key], source[source_key]])
            kind = (target.device, target.dtype, new.device, new.dtype)
            targets, sources = kinds.setdefault(kind, ([], []))
            targets.append(target)
            sources.append(new)
        for targets, sources in kinds.values():
            torch._foreach_copy_(targets, sources)


Slot = tuple[dict[str, Any], str]
"""A tensor, by the dictionary that holds it and its key there."""


def slots(module: nn.Module) -> dict[str, Slot]:
    """Every parameter and buffer by name; one that is shared, once."""
    slots: dict[str, Slot] = {}
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for holder in (child._parameters, child._buffers):
            for key, tensor in holder.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    slots[f"{prefix}.{key}" if prefix else key] = (holder, key)
    return slots


def _mismatch(ours: dict[str, Slot], theirs: dict[str, Slot]) -> str | None:
    if different := ours.keys() ^ theirs.keys():
        return f"only one of them has {min(different)}"
    for name, (holder, key) in ours.items():
        mine, other = holder[key], theirs[name][0][theirs[name][1]]
        if mine.shape != other.shape:
            return f"{name} is of shape {tuple(mine.shape)} here, {tuple(other.shape)} there"
        if (mine.device, mine.dtype) != (other.device, other.dtype):
            return (
                f"{name} is {mine.dtype} on {mine.device} here, {other.dtype} on {other.device} "
                "there; move and cast the model first, then build its teacher"
            )
    return None


def _too_coarse(ours: dict[str, Slot], precise: dict[str, Slot]) -> str | None:
    """What lost the float32 average that half precision needs, by a cast after the fact."""
    for name, (holder, key) in ours.items():
        average, average_key = precise.get(flat(name), (holder, key))
        if average[average_key].dtype in LOW_PRECISION:
            return f"{name} was cast to half precision after the teacher was built"
    return None


def flat(name: str) -> str:
    """A parameter's name as a buffer's, which may not have dots."""
    return name.replace(".", "/")
