"""EMATeacher: the averaged, frozen copy of a model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from saltflat._folded import Folding
from saltflat._plan import LOW_PRECISION, Plan, flat, slots
from saltflat.core import cuda_graph
from saltflat.core.batchnorm import frozen_running_stats, running_layers
from saltflat.core.distributed import Group, local, take_first_ranks, world


def decay_for_half_life(half_life_epochs: float, steps_per_epoch: int) -> float:
    """The decay with which a weight's part in the average halves every `half_life_epochs`.

    Example:
        >>> round(decay_for_half_life(3.545, steps_per_epoch=391), 5)  # the paper's, on CIFAR
        0.9995
    """
    if not (half_life_epochs > 0 and steps_per_epoch > 0):
        raise ValueError(
            "half_life_epochs and steps_per_epoch must be positive, got "
            f"{half_life_epochs} and {steps_per_epoch}"
        )
    return float(0.5 ** (1 / (half_life_epochs * steps_per_epoch)))


class EMATeacher(nn.Module):
    r"""The exponential moving average of a model, in eval mode and without gradient.

    .. math:: v_t = \beta v_{t-1} + (1 - \beta) \theta_t \qquad \text{(10)}

    Parameters and floating-point buffers are averaged, running variances as standard deviations;
    other tensors, and masks that hold infinities, are copied. Half-precision tensors are averaged
    in float32 and rounded for use, or an average that moves by 1 - decay a step would stand still.
    A model that has become NaN makes the teacher NaN for good: leave the update out where you leave
    the step out.

    Forward passes of a convolutional network are cheaper after `fold()`: they run a twin whose
    convolutions normalise their outputs themselves, with weights in autocast's precision, on a GPU
    in one cuDNN kernel with the ReLU and the sum before it. The twin follows `update`, loading and
    any other change of the teacher's tensors that PyTorch counts (it does not count those made
    through `.data`), inside CUDA graphs too if they are captured after `fold()`. It is no part of
    the state, and a copy of the teacher has none.

    On several processes every teacher is rank 0's, to the bit. The ranks' parameters are the same,
    but each has BatchNorm statistics of its own batches: DistributedDataParallel makes them rank
    0's only when the next forward pass begins, and the update comes before. So an update sends
    rank 0's buffers to the others, and the first one all that the teacher has.

    Args:
        model: The model to average; copied, without its DDP or torch.compile wrapper.
        decay: The paper's beta, reached at once without `warmup`.
        warmup: Let the decay grow as min(decay, (1 + t) / (10 + t)) over the updates t = 0, 1, ...
            Without it, the random initialisation still is a third of the teacher when the loss
            starts on CIFAR.
        deviations: Whether running variances are averaged as standard deviations, as which the
            outputs of an average of shrinking weights spread. The average of variances, which the
            paper's code has, is more than the square of that.
        process_group: The processes that train together; the default group unless said.

    Raises:
        ValueError: If the decay is not within [0, 1], or a copy of the model would run the model.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(0.0)
        >>> teacher = EMATeacher(model, decay=0.75, warmup=False)
        >>> _ = model.weight.data.fill_(4.0)
        >>> teacher.update(model)
        >>> teacher(torch.ones(1, 1))
        tensor([[1.]])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        decay: float = 0.9995,
        warmup: bool = True,
        deviations: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be within [0, 1], got {decay}")
        self.decay = decay
        self.warmup = warmup
        self._deviations = deviations
        self.frozen = False
        """Whether `update` counts, and leaves the average as it is; no part of the state."""
        self.updates = 0
        self._group = Group(process_group)
        self._alike = False
        """Whether the teachers of several processes have been made the same."""
        self.module = _copied(_unwrapped(model)).requires_grad_(False)
        self.eval()
        tensors = {name: holder[key] for name, (holder, key) in slots(self.module).items()}
        # Decided once and kept in the state: a value may become finite later.
        can_average = [t.is_floating_point() and bool(t.isfinite().all()) for t in tensors.values()]
        self.register_buffer("_can_average", torch.tensor(can_average, device="cpu"))
        # The float32 averages that half-precision tensors of the module are rounded from.
        self.precise = nn.Module()
        for name, tensor in tensors.items():
            if tensor.dtype in LOW_PRECISION:
                self.precise.register_buffer(flat(name), tensor.float())
        self._plan: Plan | None = None
        self._folding: Folding | None = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The averaged model's outputs."""
        with torch.no_grad():
            if self._folding is not None:
                twin = self._folding.twin(self.module, inputs, kwargs)
                if twin is not None:
                    return twin(*inputs)
            return self.module(*inputs, **kwargs)

    def by_batch(self, *inputs: Any, **kwargs: Any) -> Any:
        """The averaged model's outputs, normalised by the batch as the model's are in training.

        BatchNorm alone does as in training, and its statistics stay as they were.
        """
        layers = running_layers(self.module)
        with torch.no_grad(), frozen_running_stats(self.module):
            for layer in layers:
                layer.training = True
            try:
                return self.module(*inputs, **kwargs)
            finally:
                for layer in layers:
                    layer.training = False

    def fold(self) -> bool:
        """Fold each BatchNorm into the convolution before it, from now on, where that is possible.

        The outputs stay the same to rounding. It is not possible for modules that torch.fx cannot
        trace from one tensor, nor without a BatchNorm2d that follows a Conv2d; those, and calls
        with other arguments, under torch.compile or of a module with hooks, run as they are. What
        forward reads from plain attributes of the module is read now. The first forward pass makes
        the twin, so do one before you capture a CUDA graph, and do not fold again after that.

        Returns:
            Whether it is possible.

        Example:
            >>> from torch import nn
            >>> EMATeacher(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).fold()
            True
            >>> EMATeacher(nn.Linear(3, 8)).fold()
            False
        """
        try:
            self._folding = Folding(self.module)
        except ValueError:
            self._folding = None
        return self._folding is not None

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Average the model in; call it after every optimizer step.

        Raises:
            ValueError: If the model's tensors are not those of the teacher, or not on its device.
        """
        several = world(self._group.it)[1] > 1
        if several and not self._alike:
            self._count_as_first_rank()
        plan, model = self._plan, _unwrapped(model)
        if plan is None or plan.model() is not model:
            which = self.get_buffer("_can_average")
            plan = self._plan = Plan(
                self.module, self.precise, which, model, deviations=self._deviations
            )
        if not self.frozen:
            self._average(plan)
        elif not cuda_graph.capturing():
            self.before_replay()
        if several and not (self.frozen and self._alike):
            take_first_ranks(plan.owned(buffers=self._alike), self._group.it)
            self._alike = True
            self._outdate()

    def _average(self, plan: Plan) -> None:
        averages, live = plan.averaged()
        if averages:
            known = None
            if not cuda_graph.capturing():
                plan.prepare(averages, live)
                known = 1 - self.next_decay()
                self.before_replay()
            plan.average(averages, live, known)
        plan.copy()
        self._outdate()

    def _count_as_first_rank(self) -> None:
        """Take over rank 0's count of updates, and what of it is averaged."""
        averaged = self.get_buffer("_can_average")
        device = next(iter(self.module.parameters()), averaged).device
        message = torch.cat([torch.tensor([self.updates]), averaged.long().cpu()]).to(device)
        take_first_ranks([message], self._group.it)
        self.updates = int(message[0])
        averaged.copy_(message[1:] != 0)
        self._plan = None

    def before_replay(self) -> None:
        """Count an update that a CUDA graph is about to repeat, and set its decay.

        A captured `update` cannot count, nor know how far the warm-up is. Update at least once
        before the capture, and call this before each replay. An update of a frozen teacher is
        another one, and has a capture of its own.
        """
        if self._plan is None:
            raise RuntimeError("update the teacher once before its update is captured or replayed")
        if not self.frozen:
            self._plan.weight.fill_(1 - self.next_decay())
            self._outdate()
        self.updates += 1

    def next_decay(self) -> float:
        """The decay of the next update."""
        if not self.warmup:
            return self.decay
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    @property
    def deviations(self) -> bool:
        """Whether running variances are averaged as standard deviations."""
        return self._deviations

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The processes that train together; None for the default group."""
        return self._group.it

    @property
    def nbytes(self) -> int:
        """Bytes of the average, or this rank's part of it, and of what `fold` has made of it."""
        folded = 0 if self._folding is None else self._folding.nbytes
        return folded + sum(tensor.nbytes for tensor in local(self.state_dict().values()))

    def train(self, mode: bool = True) -> EMATeacher:
        """Stay in eval mode, whatever the module that holds the teacher does."""
        return super().train(False)

    def get_extra_state(self) -> Tensor:
        """How many updates there were, on which the warm-up depends."""
        return torch.tensor(self.updates, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Continue the count of the loaded state."""
        self.updates = int(state)
        self._plan = None
        self._outdate()

    def _apply(self, fn: Any, recurse: bool = True) -> EMATeacher:
        self._plan = None  # and so look at the devices and dtypes again
        self._outdate()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None, "_folding": None}

    def _outdate(self) -> None:
        if self._folding is not None:
            self._folding.outdate()

    def extra_repr(self) -> str:
        return f"decay={self.decay}, warmup={self.warmup}, deviations={self.deviations}"


def _copied(model: nn.Module) -> nn.Module:
    """A copy that runs its own weights: functions are not copied, and one may know the model."""
    twin = copy.deepcopy(model)
    for (name, theirs), own in zip(model.named_modules(), twin.modules(), strict=True):
        vars(own).pop("_compiled_call_impl", None)  # which some modules, as Lightning's, copy
        forward = vars(own).get("forward")
        if forward is None or forward is not vars(theirs)["forward"]:
            continue  # a method is bound to the copy
        inner = getattr(forward, "_torchdynamo_orig_callable", None)
        if getattr(inner, "__func__", None) is not type(own).forward:
            raise ValueError(
                f"{name or type(model).__name__}.forward is a function that was put on the object, "
                "and in a copy would still run the model itself: define it in a class"
            )
        del own.forward  # torch.compile's, of the model
    return twin


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's and data-parallel wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
            model = model._orig_mod
        else:
            return model
