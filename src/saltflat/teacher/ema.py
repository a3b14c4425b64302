"""EMATeacher: the moving average of a model, in eval mode and without gradient."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from saltflat.core.checks import flag, real_number
from saltflat.core.cuda_graph import eager
from saltflat.core.distributed import Group, local, take_first_ranks, world
from saltflat.teacher.fold import FoldedTwin

_HALF = (torch.float16, torch.bfloat16)
"""Too coarse for an average that moves by 1 - decay a step."""


def decay_for_half_life(half_life_epochs: float, steps_per_epoch: int) -> float:
    """The decay with which a weight's part in the average halves every `half_life_epochs`.

    Raises:
        ValueError: If an argument is not positive.

    Example:
        >>> round(decay_for_half_life(3.545, steps_per_epoch=391), 5)  # the paper's, on CIFAR
        0.9995
    """
    real_number("half_life_epochs", half_life_epochs, above=True)
    real_number("steps_per_epoch", steps_per_epoch, above=True)
    return float(0.5 ** (1 / (half_life_epochs * steps_per_epoch)))


class EMATeacher(nn.Module):
    r"""The exponential moving average of a model, in eval mode and without gradient.

    .. math:: v_t = \beta v_{t-1} + (1 - \beta) \theta_t \qquad \text{(10)}

    Parameters and floating-point buffers are averaged. Integer tensors are copied, and so are
    buffers that hold an infinity, such as attention masks. Half-precision tensors are averaged in
    float32 and rounded for use: in half precision, steps of 1 - decay would round to nothing.

    The copy has the model's hooks. A hook that refers to the model's own layers uses the model's
    weights in the teacher, too.

    A model with NaN weights makes the teacher NaN for good. Skip `update` where you skip the step.

    On several processes every teacher is bit-exact with rank 0's. Each update broadcasts rank 0's
    buffers, because BatchNorm statistics differ between ranks; the first one broadcasts all.

    Args:
        model: The model to average. Is copied, without its DDP or torch.compile wrapper.
        decay: The paper's beta.
        warmup: Whether update t = 0, 1, ... has the decay min(decay, (1 + t) / (10 + t)), so that
            the random initialisation is forgotten at once.
        average_std: Whether running variances are averaged as standard deviations. The outputs of
            averaged weights spread that way; the average of variances is larger.
        process_group: The processes that train together; the default group unless given.

    Raises:
        ValueError: If the decay is not within [0, 1], or a copy of the model would run the model.
        TypeError: If the model is not a module.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(0.0)
        >>> teacher = EMATeacher(model, decay=0.75)
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
        warmup: bool = False,
        average_std: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.decay = real_number("decay", decay, most=1)
        self.warmup = flag("warmup", warmup)
        self.average_std = flag("average_std", average_std)
        self.frozen = False
        """Whether `update` counts, but leaves the average as it is; not part of the state."""
        self.updates = 0
        self._group = Group(process_group)
        self._in_step = False  # whether a GraphedStep contains the update
        self._same_on_all_ranks = False
        self.module = _copied(_unwrapped(model)).requires_grad_(False)
        self.eval()
        tensors = _tensors(self.module)
        # Decided once and kept in the state: a value may become finite later.
        self._averaged = [
            t.is_floating_point() and bool(t.isfinite().all()) for t in tensors.values()
        ]
        self.precise = nn.Module()
        """The float32 averages of half-precision tensors."""
        for name, tensor in tensors.items():
            if tensor.dtype in _HALF:
                self.precise.register_buffer(_flat(name), tensor.float())
        self._weight: Tensor | None = None
        """With `warmup`, 1 - decay of the next update, on the device: a replay reads it there."""
        self._twin: tuple[FoldedTwin, ...] = ()  # not a submodule: no part of the state
        self.register_load_state_dict_post_hook(EMATeacher._refresh)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The averaged model's outputs."""
        with torch.no_grad():
            if self._twin and len(inputs) == 1 and not kwargs:
                return self._twin[0](*inputs)
            return self.module(*inputs, **kwargs)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Average the model in; call it after every optimizer step.

        Raises:
            ValueError: If the model's tensors are not those of the teacher, or not on its device.
        """
        ours, theirs = _tensors(self.module), _tensors(_unwrapped(model))
        precise = dict(self.precise.named_buffers())
        averages = {name: precise.get(_flat(name), own) for name, own in ours.items()}
        _check_same(ours, theirs, averages)
        several = world(self._group.it)[1] > 1
        if several and not self._same_on_all_ranks:
            self._take_first_ranks_state()
        if not self.frozen:
            self._average(ours, averages, theirs)
            if several:
                buffers = [name for name, t in ours.items() if not isinstance(t, nn.Parameter)]
                finer = [averages[name] for name in buffers if averages[name] is not ours[name]]
                take_first_ranks([*(ours[name] for name in buffers), *finer], self._group.it)
            self._refresh()
        if eager():
            self._count()
        else:
            self._in_step = True

    def _average(
        self, ours: dict[str, Tensor], averages: dict[str, Tensor], theirs: dict[str, Tensor]
    ) -> None:
        empty: tuple[list[Any], ...] = ([], [], [], [])
        plain, variances, copied, rounded = empty
        for name, averaged in zip(ours, self._averaged, strict=True):
            own, average, new = local([ours[name], averages[name], theirs[name]])
            if not averaged:
                copied.append((own, new))
                continue
            if averages[name] is not ours[name]:
                rounded.append((own, average))
                new = new.to(average.dtype)
            variance = self.average_std and name.endswith("running_var")
            by_root = variance and not isinstance(ours[name], nn.Parameter)
            (variances if by_root else plain).append((average, new))
        if plain:
            self._lerp(*zip(*plain, strict=True))
        if variances:
            old, new_ones = zip(*variances, strict=True)
            stds = torch._foreach_sqrt(old)
            self._lerp(stds, torch._foreach_sqrt(new_ones))
            copied += zip(old, torch._foreach_mul(stds, stds), strict=True)
        for pairs in (copied, rounded):  # in this order: half precision is rounded from averages
            if pairs:
                into, source = zip(*pairs, strict=True)
                torch._foreach_copy_(into, source)

    def _lerp(self, averages: Any, new: Any) -> None:
        """averages += (1 - decay) (new - averages)."""
        if not self.warmup:
            torch._foreach_lerp_(averages, new, 1 - self.decay)
            return
        if self._weight is None:
            self._weight = averages[0].new_zeros(())  # of their dtype: else no fused kernel
            self._write_weight()
        change = torch._foreach_sub(new, averages)
        torch._foreach_mul_(change, self._weight)
        torch._foreach_add_(averages, change)

    def _write_weight(self) -> None:
        if self._weight is not None:
            warm = (1 + self.updates) / (10 + self.updates)
            self._weight.fill_(1 - min(self.decay, warm))

    def graph_key(self) -> Hashable:
        """Whether the teacher is frozen: what Python decides in `update`."""
        return (self.frozen,)

    def tick(self) -> None:
        """Count an update that is part of a `GraphedStep`; others count themselves."""
        if self._in_step:
            self._count()

    def _count(self) -> None:
        self.updates += 1
        self._write_weight()

    def fold(self) -> bool:
        """From now on, run with each BatchNorm folded into the convolution before it.

        Outputs stay the same to rounding; a `forward` that switches autocast is traced without
        the switch. `update` and loading a state follow; after changing the
        teacher's tensors by hand, fold again. A copy of the teacher is not folded. Fold before you
        capture a CUDA graph, and not again after that.

        Returns:
            Whether that is possible: whether torch.fx can trace the model and finds such a pair.

        Example:
            >>> from torch import nn
            >>> EMATeacher(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).fold()
            True
            >>> EMATeacher(nn.Linear(3, 8)).fold()
            False
        """
        try:
            self._twin = (FoldedTwin(self.module),)
        except ValueError:
            self._twin = ()
        return bool(self._twin)

    def _refresh(self, _: Any = None) -> None:
        """Make the twin follow; new tensors need a new one."""
        if self._twin and self._twin[0].shares(self.module):
            self._twin[0].refresh()
        elif self._twin:
            self.fold()

    def _take_first_ranks_state(self) -> None:
        """Take over rank 0's count of updates, which tensors it averages, and the tensors."""
        tensors = [*self.module.parameters(), *self.module.buffers(), *self.precise.buffers()]
        message = self.get_extra_state().to(tensors[0].device)
        take_first_ranks([message], self._group.it)
        self.set_extra_state(message)
        take_first_ranks(tensors, self._group.it)
        self._same_on_all_ranks = True
        self._refresh()

    @property
    def nbytes(self) -> int:
        """Bytes of the average, or this rank's part of it, and of the folded weights."""
        kept = sum(tensor.nbytes for tensor in local(self.state_dict().values()))
        return kept + sum(twin.nbytes for twin in self._twin)

    def train(self, mode: bool = True) -> EMATeacher:
        """Stay in eval mode, whatever the module that holds the teacher does."""
        return super().train(False)

    def get_extra_state(self) -> Tensor:
        """The number of updates, then for each tensor whether it is averaged."""
        return torch.tensor([self.updates, *self._averaged], device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Continue from a loaded state."""
        self.updates, *averaged = state.tolist()
        self._averaged = [bool(one) for one in averaged]
        self._write_weight()

    def _apply(self, fn: Any, recurse: bool = True) -> EMATeacher:
        super()._apply(fn, recurse)
        self._weight = None
        if self._twin:
            self.fold()  # which also moves the folded weights
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_twin": ()}

    def extra_repr(self) -> str:
        return f"decay={self.decay}, warmup={self.warmup}, average_std={self.average_std}"


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name; a shared one once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for holder in (child._parameters, child._buffers):
            for key, tensor in holder.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{prefix}.{key}" if prefix else key] = tensor
    return found


def _check_same(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], averages: dict[str, Tensor]
) -> None:
    """Raise if the model is not one that this teacher can average."""
    if different := ours.keys() ^ theirs.keys():
        raise ValueError(f"model is not the teacher's: only one of them has {min(different)}")
    for name, own in ours.items():
        new = theirs[name]
        if (own.shape, own.dtype, own.device) != (new.shape, new.dtype, new.device):
            kinds = (f"{t.dtype} of shape {tuple(t.shape)} on {t.device}" for t in (new, own))
            raise ValueError(
                f"model is not the teacher's: {name} is {next(kinds)} in the model, and "
                f"{next(kinds)} in the teacher. Move and cast the model before you build it"
            )
        if averages[name].dtype in _HALF:
            raise ValueError(
                f"{name} was cast to {own.dtype} after the teacher was built: cast the model first"
            )


def _flat(name: str) -> str:
    """A parameter's name as a buffer's, which may not have dots."""
    return name.replace(".", "/")


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
                f"{name or type(model).__name__}.forward is a function that was set on the object, "
                "and a copy would still run the model itself: define it in a class"
            )
        del own.forward  # torch.compile's, of the model
    return twin


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's and data-parallel wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model
