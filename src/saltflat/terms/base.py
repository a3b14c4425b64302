"""What a trajectory method writes, and the path that every call takes.

A call of a term, in this order:

1. `reference` looks up what the outputs are compared with;
2. `loss` is weight * divergence(outputs, reference) over the rows that have a reference;
3. `record` remembers the outputs for later epochs.

Before `start_epoch` only 3 happens, in eval mode nothing. A method overrides these three, and
`update` if something follows the optimizer's step. `saltflat.terms.saf` is a short example.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from saltflat.core import cuda_graph
from saltflat.core.checks import real_number, whole_number
from saltflat.core.distributed import Group, world
from saltflat.memory.merge import all_reduce, require_agreement
from saltflat.memory.state import PlainState
from saltflat.memory.table import SampleMemory
from saltflat.terms.divergence import trajectory_loss
from saltflat.terms.misuse import Misuse

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


class TrajectoryTerm(PlainState):
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

    lag = 0
    """How many epochs ago a reference was recorded."""
    class_dim = -1

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
        super().__init__()
        self.weight = real_number("weight", weight)
        self.temperature = real_number("temperature", temperature, most=1e6, above=True)
        self.start_epoch = whole_number("start_epoch", start_epoch)
        self.tau_squared = tau_squared
        self.divergence: Callable[..., Tensor] = partial(
            trajectory_loss, temperature=self.temperature, tau_squared=tau_squared
        )
        self.memory = memory
        self.epoch: int | None = None
        self.active = False
        """Whether the loss is added in this epoch."""
        self._begun = False  # not `epoch`, for each number of which torch.compile would recompile
        self._since = 0  # the first epoch that was set
        # Rows, finite ones, those with a reference, those of known samples: of this process since
        # the last sync; and of all in this epoch, beside the rows that were not finite before it.
        self._counted = torch.zeros(4, dtype=torch.int64, device="cpu")
        self._counts = torch.zeros(5, dtype=torch.int64, device="cpu")
        self._steps = 0  # since set_epoch
        self._misuse = Misuse(type(self).__name__)
        self._group = Group(process_group)

    # What a method writes.

    def reference(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """What to compare the outputs with, and the rows (booleans) that have such a reference."""
        raise NotImplementedError(f"{type(self).__name__} must define reference()")

    def loss(self, outputs: Tensor, reference: Tensor, valid: Tensor, batch: Batch) -> Tensor:
        """The loss: a sum over the valid rows, divided by the number of all rows."""
        return self.weight * self.divergence(outputs, reference, valid=valid)

    def record(self, outputs: Tensor, batch: Batch, keep: Tensor) -> None:
        """Remember the outputs of the rows to keep. Default: nothing."""

    def update(self, model: nn.Module) -> None:
        """Follow the model; call it after every `optimizer.step()`. Default: nothing."""

    @property
    def first_epoch(self) -> int:
        """The first epoch that can have a loss."""
        return max(self.start_epoch, self.lag)

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
            TrajectoryTerm.tick(self)  # not a method's own, which may count its `update` too
        return loss

    def _batch(
        self, outputs: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Batch]:
        """The outputs as (rows, classes), and the batch with its index and labels likewise."""
        name, shape = type(self).__name__, tuple(outputs.shape)
        if len(args) == 1 and isinstance(args[0], Batch):
            index, labels, inputs = args[0].index, args[0].labels, args[0].inputs
        else:
            if self.needs_index and (not args or args[0] is None):
                raise TypeError(f"{name} needs the samples' index: term(outputs, index)")
            index = torch.as_tensor(args[0]) if self.needs_index else None
            labels = kwargs.pop("labels", None) if self.needs_labels else None
            inputs = args[1:] if self.needs_index else args, kwargs
            if not self.needs_inputs and any(inputs):
                raise TypeError(f"{name} takes no further arguments, got {len(args)} and {kwargs}")
        if not outputs.is_floating_point():
            raise ValueError(f"outputs must be floating-point numbers, got {outputs.dtype}")
        dims = range(-len(shape), len(shape))
        if len(shape) < 2 or self.class_dim not in dims or shape[self.class_dim] < 2:
            raise ValueError(
                f"outputs must be of shape (batch, ..., classes) with 2 or more classes, got "
                f"{shape}: {ONE_LOGIT}"
            )
        if self.memory is not None and shape[self.class_dim] != self.memory.num_classes:
            raise ValueError(
                f"outputs must be of shape (batch, ..., {self.memory.num_classes}), got {shape}. "
                "Classes in dimension 1: outputs.movedim(1, -1)"
            )
        outputs = outputs.movedim(self.class_dim, -1)
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

    # Epochs.

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; call it on every process, at the start of every epoch.

        Args:
            epoch: Counted from 0. The same number again, as after a resume, changes nothing.

        Raises:
            ValueError: If it is not a whole number from 0, or earlier than the last one; or if
                indices on a GPU were out of range since the last call.
            RuntimeError: If the processes differ, or one does not call.
        """
        number = whole_number("epoch", epoch)
        if self.epoch is None:
            self._since = number
        elif number < self.epoch:
            raise ValueError(
                f"epoch {number} comes after epoch {self.epoch}: to go back, load an earlier "
                "state_dict; for a new run, build a new object"
            )
        elif number > self.epoch:
            self.sync()
            self._end_epoch(self.epoch)
        self._begin(number)

    def _begin(self, epoch: int) -> None:
        self.epoch, self.active, self._steps = epoch, epoch >= self.start_epoch, 0
        self._begun = True
        if self.memory is not None:
            self.memory.join(self._group.it)
            self.memory.begin_epoch(epoch)

    def _end_epoch(self, epoch: int) -> None:
        """Notice misuse in what the epoch counted, and count anew."""
        rows, finite, referenced, known, before = self._counts.tolist()
        self._counts.copy_(torch.tensor([0, 0, 0, 0, before + rows - finite]))
        if rows and not referenced and epoch >= max(self.start_epoch, self._since + self.lag):
            self._misuse.no_reference(epoch)
        if self.memory is None:
            return
        written, visits = self.memory.written(), known - (rows - finite)
        if written < 0.9 * min(visits, self.memory.num_samples):
            self._misuse.few_samples(epoch, visits, written)
        if known < rows:
            raise ValueError(
                f"index was outside 0..{self.memory.num_samples - 1} in {rows - known} rows since "
                "the last set_epoch; they were neither read nor written. num_samples must be the "
                "length of the whole training set"
            )

    def sync(self) -> None:
        """Make the state whole; call it on every process before each checkpoint.

        It changes nothing of the training. On one process it only reads the counters.

        Raises:
            RuntimeError: If the processes differ in epoch or settings, or one does not call.
        """
        group, counted = self._group.it, self._counted.cpu()
        if world(group)[1] > 1:
            settings = f"{type(self).__name__}({self.extra_repr()})"
            require_agreement(-1 if self.epoch is None else self.epoch, settings, group)
            all_reduce(counted, dist.ReduceOp.SUM, group)
            if self.memory is not None and self.epoch is not None:
                self.memory.merge(group)
        self._counts[:4] += counted
        self._counted.zero_()

    @property
    def nonfinite_rows(self) -> int:
        """Rows with NaN or infinite outputs so far; reading it waits for the device.

        With several processes: of all up to the last `sync` or epoch, and of this one since.
        """
        rows, finite, *_, before = self.plain_state()["counts"].tolist()
        return int(before + rows - finite)

    # A part of a step: see `saltflat.core.registry.Part`.

    @property
    def nbytes(self) -> int:
        """Bytes kept between steps."""
        return 0 if self.memory is None else self.memory.nbytes

    def graph_key(self) -> Hashable:
        """What Python decides in the next step."""
        return self.active, self.training

    def tick(self) -> None:
        """Count a step. At powers of two, wait for a counter to notice a missing `set_epoch`."""
        self._steps += 1
        if self._steps >= 1024 and self._steps & (self._steps - 1) == 0:
            rows = int(self._counted[0] + self._counts[0])
            too_many = 2**31 if self.memory is None else 4 * self.memory.num_samples
            if rows > too_many or (self._steps >= 2**15 and not self.active):
                self._misuse.no_epoch(self.epoch or 0, rows)

    # The state.

    def plain_state(self) -> dict[str, Tensor]:
        """The epoch, the counters and the memory."""
        epoch = -1 if self.epoch is None else self.epoch
        counts = self._counts.clone()
        counts[:4] += self._counted.cpu()
        memory = {} if self.memory is None else self.memory.state()
        return {
            "epochs": torch.tensor([epoch, self._since], device="cpu"),
            "counts": counts,
            **{f"memory.{name}": tensor for name, tensor in memory.items()},
        }

    def take_plain_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state."""
        self._counts.copy_(state["counts"])
        self._counted.zero_()
        epoch, self._since = state["epochs"].tolist()
        if self.memory is not None:
            tables = {n.removeprefix("memory."): t for n, t in state.items() if "memory." in n}
            self.memory.load(tables)
        if epoch >= 0:
            self._begin(epoch)
        else:
            self.epoch, self.active, self._begun = None, False, False

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.memory is not None and world(self._group.it)[1] > 1 and self._counted.any():
            raise RuntimeError(
                "this process has rows that the others lack: call sync() on every process before "
                "state_dict()"
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def extra_repr(self) -> str:
        return (
            f"weight={self.weight}, temperature={self.temperature}, "
            f"start_epoch={self.start_epoch}, tau_squared={self.tau_squared}"
        )
