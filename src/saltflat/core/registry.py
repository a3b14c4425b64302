"""What the training loop knows of a method, and the table of methods by name."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

Kind = Literal["term", "optimizer", "task", "data", "model"]
Built = TypeVar("Built", bound=Callable[..., Any])


@runtime_checkable
class Part(Protocol):
    """A trajectory term or an optimizer wrapper, as a training loop sees it."""

    @property
    def nbytes(self) -> int:
        """Bytes kept between steps, beside the base optimizer's."""

    def graph_key(self) -> Hashable:
        """What Python decides in the next step; `()` if nothing.

        Two steps with equal keys run the same kernels on the same tensors, so that one CUDA graph
        serves both.
        """

    def tick(self) -> None:
        """Count a step. Runs after each step and is never captured.

        Write here the device scalars that the next step reads, for example a changing decay.
        """


@dataclass(frozen=True)
class Entry:
    """One registered name."""

    kind: Kind
    name: str
    build: Callable[..., Any]
    passes: str
    """Forward + backward passes a step."""
    paper: str


_ENTRIES: dict[tuple[Kind, str], Entry] = {}


def register(
    kind: Kind, name: str, *, passes: str = "1 + 1", paper: str = ""
) -> Callable[[Built], Built]:
    """Decorate a class or function so that it can be built by name.

    Args:
        kind: What it is.
        name: How users call it.
        passes: Forward + backward passes a step, for terms and optimizers.
        paper: Its citation.

    Raises:
        ValueError: If another object has that name.

    Example:
        >>> @register("term", "nothing", passes="1 + 1")
        ... class Nothing: ...
        >>> registered("term")["nothing"].build is Nothing
        True
        >>> _ = _ENTRIES.pop(("term", "nothing"))
    """

    def add(build: Built) -> Built:
        if (kind, name) in _ENTRIES:
            raise ValueError(f"the {kind} {name!r} is registered already: choose another name")
        _ENTRIES[kind, name] = Entry(kind, name, build, passes, paper)
        return build

    return add


def registered(kind: Kind) -> Mapping[str, Entry]:
    """All entries of a kind by name."""
    return MappingProxyType({e.name: e for e in _ENTRIES.values() if e.kind == kind})
