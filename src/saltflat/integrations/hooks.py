"""Helpers that the adapters share."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from saltflat.core.distributed import world
from saltflat.terms import TrajectoryTerm


class Call(NamedTuple):
    """One call of a module."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@contextmanager
def forward_calls(module: nn.Module) -> Iterator[list[Call]]:
    """While entered, collect the calls of a module."""
    calls: list[Call] = []

    def collect(_: nn.Module, inputs: Any, kwargs: dict[str, Any], output: Any) -> None:
        calls.append(Call(inputs, kwargs, output))

    handle = module.register_forward_hook(collect, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def wrap_method(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method by around(method, *args); returns a function that undoes it."""
    own, method = vars(owner).get(name), getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(owner, name, wrapped)
    if own is None:
        return lambda: delattr(owner, name)
    return lambda: setattr(owner, name, own)


def has_weights(term: TrajectoryTerm) -> bool:
    """Whether a term has weights of its own, copied from the model it was built on."""
    return next(term.parameters(), None) is not None


def warn_if_never_active(term: TrajectoryTerm, epochs: float, limit: str) -> None:
    """Warn on rank 0 if training ends before the term's loss begins.

    Args:
        term: The term.
        epochs: How many epochs training has.
        limit: The setting that says so.
    """
    if epochs <= term.first_epoch and world(None)[0] == 0:
        warnings.warn(
            f"{type(term).__name__} adds no loss: it starts in epoch {term.first_epoch}, and "
            f"training ends with {limit}. Lower start_epoch{' or lag' * bool(term.lag)}, or train "
            "longer",
            stacklevel=3,
        )
