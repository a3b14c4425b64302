"""Base class of all terms: the order of one call, and the methods to override.

A call of a term, in this order:

1. `reference` looks up what the outputs are compared with;
2. `loss` is weight * divergence(outputs, reference) over the rows that have a reference;
3. `record` remembers the outputs for later epochs.

Before `start_epoch` only 3 happens. In eval mode none of them happens, and the result is 0.

A new method is a class in a file of its own. It sets the flags (`needs_index`, ...), hands its
memory to `super().__init__`, and overrides `reference`. It overrides `record` if it remembers
outputs, `update` if something follows the optimizer's step, and `loss` if weight * divergence does
not do. `@register("term", name)` gives it a name. `saltflat.terms.saf` is a short example.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from saltflat.core import cuda_graph
from saltflat.core.checks import flag, real_number
from saltflat.memory.table import SampleMemory
from saltflat.terms.divergence import trajectory_loss
from saltflat.terms.epochs import EpochState

ONE_LOGIT = (
    "the probability of a single class is always 1, and the loss 0. Where one logit z stands for "
    "two classes, let the model return torch.cat([torch.zeros_like(z), z], -1)"
)
_WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


@dataclass(frozen=True)
class Batch:
    """What a term may ask about the batch that the outputs belong to."""

    index: Tensor | None = None
    """The sample of each row. A term with a memory gets it checked, on the memory's device."""
    inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    """What the model was called with."""
    labels: Tensor | None = None


class TrajectoryTerm(EpochState):
    """A term to add to any loss: weight * divergence(outputs, reference).

    Args:
        weight: The paper's lambda.
        temperature: The paper's tau.
        start_epoch: The first epoch, counted from 0, in which the loss is added.
        tau_squared: Whether to multiply by the squared temperature, as the released code does.
        memory: A memory of outputs by sample, if the method has one.
        process_group: The processes that train together. Default: all.

    Raises:
        ValueError: If an argument is out of its range.
    """

    # Loops and adapters ask these; they never ask for the class.
    needs_index = needs_inputs = needs_labels = False
    accepts_mixed = True
    """Whether a row may be a mixture of samples, as mixup and CutMix make it."""
    replaces_loss = False
    """Whether the term is the whole loss, so that a loop leaves out its own."""

    class_dim: int | None = None
    """The dimension of the classes. None: the last, of outputs of 2 or 3 dimensions."""

    def __init__(
        self,
        *,
        weight: float,
        temperature: float = 5.0,
        start_epoch: int = 0,
        tau_squared: bool = True,
        memory: SampleMemory | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(start_epoch, memory, process_group)
        self.weight = real_number("weight", weight)
        self.temperature = real_number("temperature", temperature, most=1e6, above=True)
        self.tau_squared = flag("tau_squared", tau_squared)
        self.divergence: Callable[..., Tensor] = trajectory_loss

    # What a method writes.

    def reference(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """What to compare the outputs with, and the rows (booleans) that have such a reference."""
        raise NotImplementedError(f"{type(self).__name__} must define reference()")

    def loss(self, outputs: Tensor, reference: Tensor, valid: Tensor, batch: Batch) -> Tensor:
        """The loss: a sum over the valid rows, divided by the number of all rows."""
        how = {"temperature": self.temperature, "tau_squared": self.tau_squared}
        return self.weight * self.divergence(outputs, reference, valid=valid, **how)

    def record(self, outputs: Tensor, batch: Batch, keep: Tensor) -> None:
        """Remember the outputs of the rows to keep. Default: nothing."""

    def update(self, model: nn.Module) -> None:
        """Follow the model; call it after every `optimizer.step()`. Default: nothing."""

    # A call.

    def forward(self, outputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch; records its outputs.

        Args:
            outputs: Of the training-mode pass, of shape (batch, ..., classes). Every position is a
                row.
            *args: The index if the term needs it, then the model's inputs if it needs them. Or one
                `Batch`, as loops and adapters give it to any term.
            **kwargs: `labels` if the term needs them; the model's keyword inputs.

        Returns:
            A scalar to add to the loss.

        Raises:
            ValueError: If the shapes do not fit; nothing is recorded then.
            RuntimeError: If no epoch was set.
        """
        if not self._begun:
            raise RuntimeError("call set_epoch(epoch) at the start of every epoch, before forward")
        eager = cuda_graph.eager()
        rows, batch = self._batch(outputs, args, kwargs)
        loss = rows.new_zeros((), dtype=torch.promote_types(rows.dtype, torch.float32))
        if not self.training:
            return loss
        keep = rows.detach().sum(-1, dtype=torch.float32).isfinite()  # no NaN and no infinity
        valid = torch.zeros_like(keep)
        if self.active:
            reference, valid = self.reference(rows, batch)
            if self.memory is not None and not eager:
                reference, valid = cuda_graph.keep(reference), cuda_graph.keep(valid)
            valid = valid & keep
            loss = self.loss(rows, reference, valid, batch)
        self.record(rows, batch, keep)
        every = known = torch.ones_like(keep)
        if self.memory is not None and batch.index is not None:
            known = (batch.index < self.memory.num_samples).to(keep.device, non_blocking=True)
        if self._counted.device != keep.device:
            self._counted = self._counted.to(keep.device)
        self._counted += torch.stack([every, keep, valid, known]).sum(1)
        if eager:
            self.tick()
        return loss

    def _batch(
        self, outputs: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Batch]:
        """The outputs as (rows, classes), and the batch with its index and labels likewise."""
        name = type(self).__name__
        if len(args) == 1 and isinstance(args[0], Batch):
            index, labels, inputs = args[0].index, args[0].labels, args[0].inputs
        else:
            if self.needs_index and (not args or args[0] is None):
                raise TypeError(f"{name} needs the samples' index: term(outputs, index)")
            index = torch.as_tensor(args[0]) if self.needs_index else None
            labels = kwargs.pop("labels", None) if self.needs_labels else None
            inputs = (args[1:] if self.needs_index else args), kwargs
            if not self.needs_inputs and any(inputs):
                raise TypeError(f"{name} takes no further arguments, got {len(args)} and {kwargs}")
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            got = getattr(outputs, "dtype", type(outputs).__name__)
            raise ValueError(f"outputs must be a tensor of floating-point numbers, got {got}")
        shape, dim = tuple(outputs.shape), -1 if self.class_dim is None else self.class_dim
        if len(shape) > 3 and self.memory is None and self.class_dim is None:
            raise ValueError(
                f"outputs of shape {shape}: say which dimension the classes are, for (N, C, H, W) "
                f"{name}(..., class_dim=1) or outputs.movedim(1, -1).flatten(0, -2)"
            )
        if len(shape) < 2 or dim not in range(-len(shape), len(shape)) or shape[dim] < 2:
            raise ValueError(
                f"outputs must be of shape (batch, ..., classes) with 2 or more classes, got "
                f"{shape}: {ONE_LOGIT}"
            )
        if self.memory is not None and shape[dim] != self.memory.num_classes:
            raise ValueError(
                f"outputs must be of shape (batch, ..., {self.memory.num_classes}), got {shape}. "
                "Classes in dimension 1: outputs.movedim(1, -1)"
            )
        outputs = outputs.movedim(dim, -1)
        given = {"index": index if self.needs_index else None}
        given["labels"] = labels if self.needs_labels else None
        for argument, values in given.items():
            got = None if values is None else tuple(values.shape)
            if getattr(self, f"needs_{argument}") and got != tuple(outputs.shape[:-1]):
                raise ValueError(
                    f"{argument} must be of shape {tuple(outputs.shape[:-1])} for outputs of shape "
                    f"{shape}, got {got}"
                )
            given[argument] = None if values is None else values.flatten()
        outputs, index = outputs.flatten(0, -2), given["index"]
        if index is not None and self.memory is not None:
            index = self._known(index, outputs)
        return outputs, Batch(index, inputs, given["labels"])

    def _known(self, index: Tensor, outputs: Tensor) -> Tensor:
        """The index on the memory's device, with `num_samples` for what is out of range.

        An index on the host is checked at once. One on a GPU is not waited for: the next
        `set_epoch` reports it.
        """
        memory: Any = self.memory
        last = memory.num_samples - 1
        if index.dtype not in _WHOLE:
            raise ValueError(f"index must be whole numbers, got {index.dtype}")
        if memory.device != outputs.device:
            memory.place(outputs.device)
        if not index.is_cuda and len(index) and cuda_graph.eager():
            least, most = map(int, torch.aminmax(index))
            if least < 0 or most > last:
                raise ValueError(
                    f"index must be within 0..{last}, got {least} to {most}: num_samples must be "
                    "the length of the whole training set"
                )
        on_host = memory.device.type == "cpu"  # where a copy must have arrived to be read
        if on_host and outputs.is_cuda and cuda_graph.capturing():
            raise RuntimeError("a CUDA graph cannot hold device='cpu': keep the memory on the GPU")
        index = index.to(memory.device, torch.int64, non_blocking=not on_host)
        return torch.where((index >= 0) & (index <= last), index, last + 1)

    # A part of a step: see `saltflat.core.registry.Part`.

    @property
    def nbytes(self) -> int:
        """Bytes kept between steps."""
        return 0 if self.memory is None else self.memory.nbytes

    def graph_key(self) -> Hashable:
        """What Python decides in the next step."""
        return self.active, self.training

    def tick(self) -> None:
        """Count a call. After 64, 128, ... of them read a counter, to notice an endless epoch."""
        self._steps += 1
        if self._steps >= 64 and self._steps & (self._steps - 1) == 0:
            rows = int(self._counted[0] + self._counts[0])
            too_many = 2**31 if self.memory is None else 4 * self.memory.num_samples
            if rows > too_many or (self._steps >= 2**13 and not self.active):
                self._misuse.no_epoch(self.epoch or 0, rows)

    def extra_repr(self) -> str:
        return (
            f"weight={self.weight}, temperature={self.temperature}, "
            f"start_epoch={self.start_epoch}, tau_squared={self.tau_squared}"
        )
