"""How an adapter comes between a framework and the user's own objects, and leaves again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


class Call(NamedTuple):
    """One call of a module."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def logits(self) -> Tensor:
        """The output itself, or what it has as `.logits`, as Hugging Face's models do."""
        logits: Tensor = getattr(self.output, "logits", self.output)
        return logits


@contextmanager
def calls_of(module: nn.Module) -> Iterator[list[Call]]:
    """The calls of a module that end within."""
    calls: list[Call] = []

    def record(_: nn.Module, inputs: Any, kwargs: dict[str, Any], output: Any) -> None:
        calls.append(Call(inputs, kwargs, output))

    handle = module.register_forward_hook(record, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def stand_before(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Have around(method, *args) called in a method's place; returns what ends that."""
    own, method = vars(owner).get(name), getattr(owner, name)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    setattr(owner, name, called)
    if own is None:
        return lambda: delattr(owner, name)
    return lambda: setattr(owner, name, own)
