"""One protocol for the whole family.

A step takes the gradient g at the weights w, climbs to w + e, takes the gradient there, comes back
to w exactly, and lets the base optimizer step with what the method makes of the two gradients. A
method says what e is (`_directions`) and perhaps what becomes of the gradients (`_combine`).

The wrapper is an optimizer whose `param_groups` and `state` are the base optimizer's own objects,
so schedulers, checkpoints and `add_param_group` need to know nothing of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from saltflat.core import cuda_graph
from saltflat.core.batchnorm import frozen_running_stats
from saltflat.core.cuda_graph import RandomState, random_state, set_random_state
from saltflat.core.perturb import displaced
from saltflat.sam._algebra import copies

Gradients = tuple[list[Tensor], list[Tensor]]
"""Parameters, and the gradient of each."""


class SharpnessAware(Optimizer):
    """A base optimizer that steps with gradients taken at displaced weights.

    Args:
        base_optimizer: Any torch optimizer, built on the parameters already.
        rho: How far to climb; a parameter group may have a "rho" of its own.
        interval: Climb in every `interval`-th step only; the steps between cost one pass. A CUDA
            graph holds one kind of step: capture one of each, see `climbs` and `before_replay`.
        model: The model, so that its BatchNorm statistics are those of the first pass alone.
        m_sharpness: Under DistributedDataParallel, let each rank climb along the gradient of its
            own part of the batch (the SAM paper's m-sharpness) instead of all along the mean. Of
            `step`; in the two-call form, run the first pass under `model.no_sync()`.

    Raises:
        ValueError: If an argument is out of its range.
    """

    _keeps_gradients = False
    """Whether `_combine` wants the gradients of the first pass too."""

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        rho: float,
        interval: int = 1,
        model: nn.Module | None = None,
        m_sharpness: bool = False,
    ) -> None:
        if not isinstance(base_optimizer, Optimizer) or isinstance(
            base_optimizer, SharpnessAware | torch.optim.LBFGS
        ):
            raise ValueError(
                f"{type(self).__name__} wraps an optimizer that steps without a closure, e.g. "
                f"torch.optim.SGD(parameters, lr), got {type(base_optimizer).__name__}"
            )
        if isinstance(interval, bool) or operator.index(interval) < 1:
            raise ValueError(f"interval must be a whole number of at least 1, got {interval!r}")
        if m_sharpness and not isinstance(model, DistributedDataParallel):
            raise ValueError("m_sharpness needs model=, the DistributedDataParallel in training")
        # What Optimizer.__init__ sets up, but for param_groups and state, which are the base's.
        super().__setstate__({"defaults": base_optimizer.defaults})
        self.base_optimizer = base_optimizer
        self.rho = rho
        self.interval = interval
        self.model = model
        self.m_sharpness = m_sharpness
        self.steps = 0
        self._first_step_done = False
        self._base_steps = False
        self._displacement: displaced | None = None
        self._first: Gradients = ([], [])
        self._check_group({"rho": rho})
        for group in self.param_groups:
            self._check_group(group)

    # What belongs to the base optimizer.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The base optimizer's."""
        return self.base_optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base optimizer's."""
        return self.base_optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer; it may have its own rho."""
        self._check_group(param_group)
        self.base_optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, and the method's own under "method"."""
        return {**self.base_optimizer.state_dict(), "method": self._method_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; a step that was under way is cancelled.

        The state of the base optimizer alone, or of another method, will do: this one starts anew.
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
        # A scheduler hangs a "step" on its optimizer that belongs to that very one.
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]
        """Take one step.

        Args:
            closure: Zeroes the gradients, runs forward and backward, returns the loss. It is
                called as often as the method needs, each time with torch's generators as they
                were at the first.

        Returns:
            The loss of the first call.

        Raises:
            RuntimeError: Without a closure, or if it does no backward pass; the weights are then
                as they were.
        """
        if self._base_steps:  # called by a GradScaler, from second_step
            return self.base_optimizer.step()  # type: ignore[return-value]
        closure = self._required(closure)
        before = random_state(self._parameters())
        with self._first_pass():
            loss = self._pass(closure)
        with self._or_cancel():
            if self.first_step():
                with self._second_pass(before):
                    self._pass(closure)
            self.second_step()
        return loss

    @torch.no_grad()
    def first_step(self) -> bool:
        """Climb, from the gradients of the first pass; these may be scaled.

        Returns:
            Whether a second pass is wanted. If so, zero the gradients and run forward and backward
            again, in `with optimizer.frozen_running_stats():`. Then call `second_step`.

        Raises:
            RuntimeError: If it is called twice, or there is no gradient.
        """
        if self._first_step_done:
            raise RuntimeError("first_step was called twice: finish the step with second_step")
        parameters, gradients = self._moved()
        climbs = self.climbs
        if climbs:
            if self._keeps_gradients:
                self._first = (parameters, copies(gradients))
            self._climb(parameters, gradients)
        self._first_step_done = True
        return climbs

    @torch.no_grad()
    def second_step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Come back, and let the base optimizer step with the gradients of the second pass.

        Args:
            scaler: What scaled the losses, if anything did. It unscales the gradients, unless
                `scaler.unscale_(optimizer)` has done so already, for clipping; and leaves the step
                out if they overflowed in either pass.

        Raises:
            RuntimeError: Without a `first_step`.
        """
        if not self._first_step_done:
            raise RuntimeError("second_step comes after first_step, which was not called")
        first = self._first
        self.cancel()
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
        if not cuda_graph.capturing():
            self.steps += 1
        self._opt_called = True  # what a scheduler that was given the wrapper looks for

    @property
    def climbs(self) -> bool:
        """Whether the step to come climbs."""
        return self.steps % self.interval == 0

    def before_replay(self) -> None:
        """Count a step that a CUDA graph is about to repeat; a captured step cannot."""
        self.steps += 1

    def cancel(self) -> None:
        """Give up a step between `first_step` and `second_step`: the weights come back."""
        displacement, self._displacement = self._displacement, None
        self._first = ([], [])
        self._first_step_done = False
        if displacement is not None:
            displacement.__exit__()

    def frozen_running_stats(self) -> frozen_running_stats:
        """The context for a second pass that leaves BatchNorm's statistics alone."""
        return frozen_running_stats(self.model)

    # What makes up a method.

    def _moved(self) -> Gradients:
        """The parameters that climb, and their gradients; by default, all that have one."""
        return self._gradients()

    def _directions(
        self, parameters: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Where to climb from the weights, given the gradients there: rho times what is returned.

        Returns:
            A direction for each parameter, which may be its gradient, and a factor for all.
        """
        raise NotImplementedError

    def _combine(self, first: Gradients, scaler: torch.amp.GradScaler | None) -> None:
        """Make the gradients to step with of those that the last pass left; by default, these.

        Args:
            first: With `_keeps_gradients`, those of the first pass; empty if there was but one.
            scaler: What scaled the losses; the gradients may have overflowed.
        """

    def _method_state(self) -> dict[str, Any]:
        return {"name": type(self).__name__, "steps": self.steps}

    def _load_method_state(self, state: dict[str, Any]) -> None:
        self.steps = state.get("steps", 0)

    def _rho(self, group: dict[str, Any]) -> float | Tensor:
        return group.get("rho", self.rho)

    def _check_group(self, group: dict[str, Any]) -> None:
        if not 0 <= group.get("rho", self.rho) < inf:
            raise ValueError(f"rho must be 0 or more, got {group['rho']}")

    # Parts of a step.

    def _first_pass(self) -> AbstractContextManager[Any]:
        per_rank = self.m_sharpness and self.climbs
        if per_rank and isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    @contextmanager
    def _second_pass(self, before: RandomState) -> Iterator[None]:
        """A pass with the first one's random numbers that leaves no trace but gradients."""
        after = random_state(self._parameters())
        try:
            set_random_state(before)
            with self.frozen_running_stats():
                yield
        finally:
            set_random_state(after)

    @contextmanager
    def _or_cancel(self) -> Iterator[None]:
        """Whatever goes wrong, an interrupt included, brings the weights back."""
        try:
            yield
        except BaseException:
            self.cancel()
            raise

    def _pass(self, closure: Callable[[], Tensor]) -> Tensor:
        """Call the closure, which must leave gradients of its own."""
        for parameter in self._parameters():
            parameter.grad = None
        loss = closure()
        self._gradients()
        return loss

    def _climb(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        if not parameters:
            return
        directions, factor = self._directions(parameters, gradients)
        groups = [(group["params"], factor * self._rho(group)) for group in self.param_groups]
        factor_of = {id(p): scaled for members, scaled in groups for p in members}
        factors = [factor_of[id(p)] for p in parameters]
        self._displacement = displaced(parameters, directions, factors)
        self._displacement.__enter__()

    def _required(self, closure: Any) -> Any:
        if closure is None:
            raise RuntimeError(
                f"{type(self).__name__}.step needs a closure that zeroes the gradients, runs "
                "forward and backward and returns the loss; or use first_step and second_step"
            )
        return torch.enable_grad()(closure)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _gradients(self) -> Gradients:
        """The parameters that have a gradient, and these."""
        pairs = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        if not pairs:
            raise RuntimeError("no parameter has a gradient: the closure must call loss.backward()")
        if any(g.is_sparse or g.is_complex() for _, g in pairs):
            raise RuntimeError("the SAM family takes dense, real gradients only")
        return [p for p, _ in pairs], [g for _, g in pairs]
