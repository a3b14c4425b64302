"""The step that the SAM family shares: climb, take a gradient there, come back, step.

Let g be the gradient at the weights w. A step climbs to w + e(w), takes the gradient there, returns
to exactly w, and lets the base optimizer step with that gradient. A method defines e(w) in
`_directions`, and may change the last gradient in `_combine`. The wrapper shares `param_groups` and
`state` with its base optimizer, so schedulers and checkpoints work on either of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import reduce
from math import inf
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from saltflat.core import cuda_graph
from saltflat.core.batchnorm import frozen_running_stats
from saltflat.core.cuda_graph import RandomState, random_state, set_random_state
from saltflat.core.distributed import local, sharded, summed
from saltflat.core.perturb import displaced

Gradients = tuple[list[Tensor], list[Tensor]]  # parameters, and the gradient of each


class SharpnessAware(Optimizer):
    """A base optimizer that steps with gradients taken at displaced weights.

    Args:
        base_optimizer: Any torch optimizer whose step needs no closure.
        rho: How far to climb. A parameter group may have a "rho" of its own.
        interval: Climb in every `interval`-th step; the others are plain steps of one pass.
        model: The model, so that the second pass leaves its BatchNorm statistics alone.
        m_sharpness: Under DistributedDataParallel, let each rank climb along the gradient of its
            own part of the batch (the SAM paper's m-sharpness), not along the mean. It acts in
            `step`. In the two-call form, run the first pass under `model.no_sync()`.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument is out of its range.
    """

    _keeps_gradients = False  # whether `_combine` needs the gradients of the first pass

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        rho: float = 0.05,
        interval: int = 1,
        model: nn.Module | None = None,
        m_sharpness: bool = False,
    ) -> None:
        if not isinstance(base_optimizer, Optimizer) or isinstance(
            base_optimizer, SharpnessAware | torch.optim.LBFGS
        ):
            raise TypeError(
                "base_optimizer must be an optimizer that steps without a closure, such as "
                f"torch.optim.SGD(parameters, lr), got {type(base_optimizer).__name__}"
            )
        check("interval", interval, "a whole number >= 1", lambda n: operator.index(n) >= 1)
        if not isinstance(model, nn.Module | None):
            raise TypeError(f"model must be a torch.nn.Module or None, got {model!r}")
        if m_sharpness and not isinstance(model, DistributedDataParallel):
            raise ValueError(
                "m_sharpness needs model= to be the DistributedDataParallel in training, got "
                f"{type(model).__name__}"
            )
        # As Optimizer.__init__, except for param_groups and state, which are the base's.
        super().__setstate__({"defaults": base_optimizer.defaults})
        self.base_optimizer, self.model = base_optimizer, cast(Any, model)
        self.rho, self.interval, self.m_sharpness = rho, interval, m_sharpness
        self.steps = 0
        self._first_step_done = self._base_steps = False
        self._displacement: displaced | None = None
        self._first: Gradients = ([], [])
        for group in ({"rho": rho}, *self.param_groups):
            self._check_group(group)

    # The base optimizer's.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base optimizer's."""
        return self.base_optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base optimizer's."""
        return self.base_optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer. It may have its own "rho"."""
        self._check_group(param_group)
        self.base_optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, and the method's own under "method"."""
        return {**self.base_optimizer.state_dict(), "method": self._method_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, after `cancel`.

        The state of the base optimizer alone, or of another method, resets the method's own.
        """
        self.cancel()
        own = [group.get("rho") for group in self.param_groups]
        base = {name: part for name, part in state_dict.items() if name != "method"}
        self.base_optimizer.load_state_dict(base)
        for group, rho in zip(self.param_groups, own, strict=True):
            if rho is not None:
                group.setdefault("rho", rho)
        method = state_dict.get("method", {})
        self._load_method_state(method if method.get("name") == type(self).__name__ else {})

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler replaces the `step` of one instance; a copy needs the class's.
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    # A part of the training loop: see saltflat.core.registry.Part.

    @property
    def climbs(self) -> bool:
        """Whether the next step climbs: every `interval`-th does."""
        return self.steps % self.interval == 0

    def graph_key(self) -> bool:
        """Steps that climb and steps that do not are a CUDA graph each."""
        return self.climbs

    def tick(self) -> None:
        """Count a step."""
        self.steps += 1
        self._opt_called = True  # a scheduler on the wrapper looks for it

    @property
    def nbytes(self) -> int:
        """Bytes kept between steps, beside the base optimizer's."""
        return 0

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[..., Tensor] | None = None) -> Tensor:  # type: ignore[override]
        """Take one step.

        Args:
            closure: Zeroes the gradients, runs forward and backward, returns the loss. Each call
                within a step sees the same random numbers of torch.

        Returns:
            The loss of the first call.

        Raises:
            RuntimeError: Without a closure or its backward pass; the weights are as they were.
        """
        if self._base_steps:  # a GradScaler calls this from second_step
            return self.base_optimizer.step()  # type: ignore[return-value]
        if closure is None:
            name = type(self).__name__
            raise RuntimeError(f"{name}.step needs a closure; or use first_step and second_step")
        try:
            return self._step(closure)
        except BaseException:  # an interrupt included
            self._restore()
            raise

    def _step(self, closure: Callable[..., Tensor]) -> Tensor:
        before = random_state(self._parameters())
        with self.model.no_sync() if self.m_sharpness and self.climbs else nullcontext():
            loss = self._pass(closure)  # g, the gradient at w
        if self.first_step():  # climb to the local maximum w + e(w)
            with self._second_pass(before):
                self._pass(closure)  # the gradient at w + e(w)
        self._update(self._restore())  # return to w; the base optimizer steps
        return loss

    @torch.no_grad()
    def first_step(self) -> bool:
        """Climb along the gradients of the first pass, which may be scaled, and drop them.

        Returns:
            Whether a second pass is needed, inside `with optimizer.frozen_running_stats():`.
            Call `second_step` in either case.

        Raises:
            RuntimeError: If it is called twice, or there is no gradient.
        """
        if self._first_step_done:
            raise RuntimeError("first_step was called twice: finish the step with second_step")
        parameters, gradients = self._moved()
        if self.climbs:
            if self._keeps_gradients:
                self._first = parameters, list(torch._foreach_mul(gradients, 1))
            if parameters:
                self._climb(parameters, gradients)
            for parameter in self._parameters():
                parameter.grad = None
        self._first_step_done = True
        return self.climbs

    @torch.no_grad()
    def second_step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Return to w, and let the base optimizer step with the gradients of the second pass.

        Args:
            scaler: What scaled the losses, if anything did. It unscales the gradients, unless
                `scaler.unscale_(optimizer)` did, and skips the step after an overflow.

        Raises:
            RuntimeError: Without `first_step`, or if since then there was no backward pass or
                the weights were changed. What had moved is then back.
        """
        if not self._first_step_done:
            raise RuntimeError("second_step needs first_step before it, which was not called")
        first = self._first
        self.cancel()
        self._gradients()  # which raises without a second backward pass
        self._update(first, scaler)

    def cancel(self) -> None:
        """Give up a step between `first_step` and `second_step` and return to w.

        Raises:
            RuntimeError: If the weights were changed since `first_step`.
        """
        overwritten = self._displacement is not None and self._displacement.overwritten()
        self._restore()
        if overwritten:
            raise RuntimeError(
                "the weights were changed between first_step and second_step; those that had "
                "moved are back: load a state before first_step or after second_step"
            )

    def frozen_running_stats(self) -> frozen_running_stats:
        """The context for a second pass, which leaves BatchNorm statistics alone."""
        return frozen_running_stats(self.model)

    # Hooks for a method.

    def _moved(self) -> Gradients:
        """The parameters that climb and their gradients; by default all that have one."""
        return self._gradients()

    def _directions(
        self, parameters: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Directions d, one for each parameter, and a length l: e(w) = rho d / l."""
        raise NotImplementedError

    def _combine(self, first: Gradients, scaler: torch.amp.GradScaler | None) -> None:
        """Change the gradients of the last pass before the base optimizer sees them.

        `first` has those of the first pass, if `_keeps_gradients` and the step climbed.
        """

    def _method_state(self) -> dict[str, Any]:
        return {"name": type(self).__name__, "steps": self.steps}

    def _load_method_state(self, state: dict[str, Any]) -> None:
        self.steps = state.get("steps", 0)

    def _rho(self, group: dict[str, Any]) -> float | Tensor:
        return group.get("rho", self.rho)

    def _check_group(self, group: dict[str, Any]) -> None:
        check("rho", group.get("rho", self.rho))

    # Parts of a step.

    @contextmanager
    def _second_pass(self, before: RandomState) -> Iterator[None]:
        """A pass with the first one's random numbers that changes gradients only."""
        after = random_state(self._parameters())
        try:
            set_random_state(before)
            with self.frozen_running_stats():
                yield
        finally:
            set_random_state(after)

    def _pass(self, closure: Callable[..., Tensor]) -> Tensor:
        """Call the closure, which must leave new gradients."""
        for parameter in self._parameters():
            parameter.grad = None
        with torch.enable_grad():
            loss = closure()
        self._gradients()
        return loss

    def _climb(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Move from w to w + e(w)."""
        directions, length = self._directions(parameters, gradients)
        direction_of = dict(zip(parameters, directions, strict=True))
        offsets: list[Tensor] = []  # e(w), in the order of the groups, as the parameters are
        for group in self.param_groups:
            members = [direction_of[p] for p in group["params"] if p in direction_of]
            offsets += scaled(members, self._rho(group) / length)
        self._displacement = displaced(parameters, offsets)
        self._displacement.__enter__()

    def _restore(self) -> Gradients:
        """Return to w if the step climbed, and forget it; returns what `_combine` needs."""
        displacement, self._displacement = self._displacement, None
        first, self._first = self._first, ([], [])
        self._first_step_done = False
        if displacement is not None:
            displacement.__exit__()
        return first

    def _update(self, first: Gradients, scaler: torch.amp.GradScaler | None = None) -> None:
        """Let the base optimizer step with the gradients that the last pass left."""
        self._combine(first, scaler)
        if scaler is None:
            self.base_optimizer.step()
        else:
            self._base_steps = True
            try:
                scaler.step(self)
            finally:
                self._base_steps = False
        torch.clear_autocast_cache()
        cuda_graph.tick(self)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _gradients(self) -> Gradients:
        """The parameters that have a gradient, and these."""
        pairs = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        if not pairs:
            raise RuntimeError("no parameter has a gradient: each pass must call loss.backward()")
        if any(g.is_sparse or g.is_complex() for _, g in pairs):
            raise RuntimeError("the SAM family takes dense, real gradients only")
        return [p for p, _ in pairs], [g for _, g in pairs]


def norm(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors, sharded or not, as one vector; in at least float32."""
    dtype = reduce(torch.promote_types, {t.dtype for t in tensors}, torch.float32)
    parts = torch._foreach_norm(local(tensors), 2, dtype=dtype)
    length = torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]))
    return summed(length**2, tensors).sqrt() if sharded(tensors) else length


def scaled(tensors: list[Tensor], factor: Tensor) -> list[Tensor]:
    """The factor times each tensor; of sharded tensors, this rank's parts."""
    parts = local(tensors)
    if len({part.device for part in parts}) == 1:
        return list(torch._foreach_mul(parts, factor.to(parts[0].device)))
    return [part * factor.to(part.device) for part in parts]


def check(
    name: str,
    value: Any,
    wanted: str = "a number >= 0",
    valid: Callable[[Any], bool] = lambda number: 0 <= number < inf,
) -> None:
    """Raise a TypeError or ValueError that names a bad setting."""
    message = f"{name} must be {wanted}, got {value!r}"
    try:
        in_range = valid(value)
    except TypeError:
        raise TypeError(message) from None
    if isinstance(value, bool) or not in_range:
        raise ValueError(message)
