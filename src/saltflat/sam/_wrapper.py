"""One protocol for the whole family.

A step takes the gradient g at the weights w, climbs to w + e, takes the gradient there, comes back
to w exactly, and lets the base optimizer step with what the method makes of the two gradients. A
method says what e is (`_offsets`) and perhaps what becomes of the gradients (`_combine`).

The wrapper is an optimizer whose `param_groups` and `state` are the base optimizer's own objects,
so schedulers, checkpoints and `add_param_group` need to know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from saltflat._batchnorm import frozen_running_stats
from saltflat._perturb import displaced
from saltflat.sam._algebra import scale_
from saltflat.sam._random import RandomState, random_state, set_random_state


class SharpnessAware(Optimizer):
    """A base optimizer that steps with gradients taken at displaced weights.

    Args:
        base_optimizer: Any torch optimizer, built on the parameters already.
        rho: How far to climb; a parameter group may have a "rho" of its own.
        interval: Climb in every `interval`-th step only; the steps between cost one pass. A CUDA
            graph holds one kind of step: capture one of each.
        model: The model, so that its BatchNorm statistics are those of the first pass alone.
        m_sharpness: Under DistributedDataParallel, let each rank climb along the gradient of its
            own part of the batch (the SAM paper's m-sharpness) instead of all along the mean.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        base_optimizer: Optimizer,
        *,
        rho: float,
        interval: int = 1,
        model: nn.Module | None = None,
        m_sharpness: bool = False,
    ) -> None:
        if not isinstance(base_optimizer, Optimizer):
            raise ValueError(
                f"{type(self).__name__} wraps an optimizer, e.g. torch.optim.SGD(parameters, lr), "
                f"got {type(base_optimizer).__name__}"
            )
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
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
        self._statistics = frozen_running_stats(model)
        self._first_step_done = False
        self._displacement: displaced | None = None
        for group in self.param_groups:
            self._take_in(group)

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
        self.base_optimizer.add_param_group(param_group)
        self._take_in(self.param_groups[-1])

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state, and the method's own under "method"."""
        return {**self.base_optimizer.state_dict(), "method": self._method_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave. The base optimizer's own will do: the method starts anew."""
        base = {name: part for name, part in state_dict.items() if name != "method"}
        self.base_optimizer.load_state_dict(base)
        for group in self.param_groups:
            self._take_in(group)
        self._load_method_state(state_dict.get("method", {}))

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
        closure = self._required(closure)
        before = random_state(self._parameters())
        with self._first_pass():
            loss = closure()
        if self.first_step():
            with self._second_pass(before):
                closure()
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
        climbs = self._climbs()
        if climbs:
            offsets = self._offsets(parameters, gradients) if parameters else []
            self._climb(parameters, offsets)
        self._first_step_done = True
        return climbs

    @torch.no_grad()
    def second_step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Come back, and let the base optimizer step with the gradients of the second pass.

        Args:
            scaler: What scaled the losses, if anything did. It unscales the gradients, and leaves
                the step out if they overflowed in either pass.

        Raises:
            RuntimeError: Without a `first_step`.
        """
        if not self._first_step_done:
            raise RuntimeError("second_step comes after first_step, which was not called")
        climbed = self._displacement is not None
        self._come_back()
        self._combine(climbed, scaled=scaler is not None)
        if scaler is None:
            self.base_optimizer.step()
        else:
            scaler.step(self.base_optimizer)
        self.steps += 1
        self._opt_called = True  # what a scheduler that was given the wrapper looks for

    def frozen_running_stats(self) -> frozen_running_stats:
        """The context for a second pass that leaves BatchNorm's statistics alone."""
        return self._statistics

    # What makes up a method.

    def _moved(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters that climb, and their gradients; by default, all that have one."""
        return self._gradients()

    def _offsets(self, parameters: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """How far to climb from the weights, given the gradients there."""
        raise NotImplementedError

    def _combine(self, climbed: bool, scaled: bool) -> None:
        """Make the gradients to step with of those that the last pass left; by default, these.

        Args:
            climbed: Whether there were two passes.
            scaled: Whether the gradients are scaled, and may have overflowed.
        """

    def _method_state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def _load_method_state(self, state: dict[str, Any]) -> None:
        self.steps = state.get("steps", 0)

    def _rho(self, group: dict[str, Any]) -> float | Tensor:
        return group["rho"]

    # Parts of a step.

    def _first_pass(self) -> AbstractContextManager[Any]:
        per_rank = self.m_sharpness and self._climbs()
        if per_rank and isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    @contextmanager
    def _second_pass(self, before: RandomState) -> Iterator[None]:
        """A pass with the first one's random numbers that leaves no trace but gradients.

        Whatever goes wrong in it brings the weights back.
        """
        after = random_state(self._parameters())
        try:
            set_random_state(before)
            with self.frozen_running_stats():
                yield
            self._gradients()
        except BaseException:
            self._come_back()
            raise
        finally:
            set_random_state(after)

    def _climbs(self) -> bool:
        """Whether this step takes a second pass."""
        return self.steps % self.interval == 0

    def _climb(self, parameters: list[Tensor], offsets: list[Tensor]) -> None:
        self._displacement = displaced(parameters, offsets)
        self._displacement.__enter__()

    def _come_back(self) -> None:
        """To the weights of before, ready for the next step."""
        self._first_step_done = False
        if self._displacement is not None:
            self._displacement.__exit__()
            self._displacement = None

    def _required(self, closure: Any) -> Any:
        if closure is None:
            raise RuntimeError(
                f"{type(self).__name__}.step needs a closure that zeroes the gradients, runs "
                "forward and backward and returns the loss; or use first_step and second_step"
            )
        return torch.enable_grad()(closure)

    def _take_in(self, group: dict[str, Any]) -> None:
        group.setdefault("rho", self.rho)
        if not group["rho"] >= 0:
            raise ValueError(f"rho must be 0 or more, got {group['rho']}")

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters that have a gradient, and these."""
        pairs = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        if not pairs:
            raise RuntimeError("no parameter has a gradient: the closure must call loss.backward()")
        return [p for p, _ in pairs], [g for _, g in pairs]

    def _times_rho_(self, parameters: list[Tensor], tensors: list[Tensor], factor: Tensor) -> None:
        """Multiply each tensor in place by factor and by the rho of its parameter's group."""
        tensor_of = {id(p): t for p, t in zip(parameters, tensors, strict=True)}
        for group in self.param_groups:
            members = [tensor_of[id(p)] for p in group["params"] if id(p) in tensor_of]
            scale_(members, factor * self._rho(group))
