"""Small problems that the tests train on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition, nop
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from saltflat import MESA, SAF, sam, with_index
from saltflat.sam.base import SharpnessAware

SAMPLES, FEATURES, CLASSES = 24, 6, 4

recomputing_backend = aot_autograd(
    fw_compiler=nop,
    bw_compiler=nop,
    decompositions=select_decomp_table,
    partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
)
"""What torch.compile does by default, short of making C++ or Triton of it: the backward pass
computes again what is cheaper to compute than to keep."""


def dataset(seed: int = 0) -> TensorDataset:
    """Noisy classes, so that a small network neither fails nor finishes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def network(seed: int = 0) -> nn.Module:
    """A small network with BatchNorm and its integer buffer."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
    )


def conv_network(classes: int = 5, seed: int = 0) -> nn.Module:
    """A small network of convolutions, each followed by its BatchNorm."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, classes),
    )


def batches(epoch: int, batch_size: int = 8) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """An epoch's batches in an order that depends on the epoch alone."""
    generator = torch.Generator().manual_seed(epoch)
    return iter(DataLoader(with_index(dataset()), batch_size, shuffle=True, generator=generator))


@dataclass(frozen=True)
class Method:
    """How a trajectory term is made for the small problem, and its lines in a loop."""

    make: Callable[..., Any]
    loss: Callable[[Any, Tensor, Tensor, Tensor], Tensor]
    after_step: Callable[[Any, nn.Module], None] = lambda term, model: None


def _saf(model: nn.Module, **kwargs: Any) -> SAF:
    return SAF(SAMPLES, CLASSES, **{"lag": 2, "start_epoch": 2, **kwargs})


def _mesa(model: nn.Module, **kwargs: Any) -> MESA:
    return MESA(model, **{"start_epoch": 2, "decay": 0.9, **kwargs})


METHODS = {
    "saf": Method(_saf, lambda saf, logits, index, x: saf(logits, index)),
    "mesa": Method(
        _mesa,
        lambda mesa, logits, index, x: mesa(logits, x),
        after_step=lambda mesa, model: mesa.update(model),
    ),
}


class Run:
    """A training run by hand: model, optimizer, and perhaps SAF or MESA."""

    def __init__(self, method: Method | None = None, **kwargs: Any) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.method = method
        self.term = method.make(self.model, **kwargs) if method else None
        self.losses: list[Tensor] = []

    def epoch(self, epoch: int, skip: int = 0, stop: int | None = None) -> None:
        """Train on batches skip..stop of an epoch."""
        if self.term is not None:
            self.term.set_epoch(epoch)
        for index, x, y in list(batches(epoch))[skip:stop]:
            logits = self.model(x)
            loss = cross_entropy(logits, y)
            if self.method is not None:
                loss = loss + self.method.loss(self.term, logits, index, x)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.method is not None:
                self.method.after_step(self.term, self.model)
            self.losses.append(loss.detach())

    def state(self) -> dict[str, Any]:
        """All that a checkpoint holds."""
        parts = {"model": self.model, "optimizer": self.optimizer, "term": self.term}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.term is not None:
            self.term.load_state_dict(state["term"])


@dataclass(frozen=True)
class Wrapper:
    """How one of the SAM family is made, and what a step of it costs."""

    make: Callable[..., SharpnessAware]
    forwards: float
    """Rows that go forward in a step on average, as a multiple of the batch."""
    backwards: float
    """Likewise backward."""
    per_row: bool = False
    """Whether the closure takes rows and returns the loss of each, as ESAM's does."""

    def closure(
        self, optimizer: SharpnessAware, model: nn.Module, x: Tensor, y: Tensor
    ) -> Callable[..., Tensor]:
        """The closure of an ordinary training step."""

        def per_row(rows: Tensor | None) -> Tensor:
            if rows is None:
                return cross_entropy(model(x), y, reduction="none")
            return cross_entropy(model(x[rows]), y[rows], reduction="none")

        def mean() -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        return per_row if self.per_row else mean


WRAPPERS = {
    "sam": Wrapper(sam.SAM, 2, 2),
    "sam, every other step": Wrapper(partial(sam.SAM, interval=2), 1.5, 1.5),
    "asam": Wrapper(sam.ASAM, 2, 2),
    "gsam": Wrapper(sam.GSAM, 2, 2),
    "esam": Wrapper(sam.ESAM, 2.5, 1.5, per_row=True),
    "looksam": Wrapper(sam.LookSAM, 1.2, 1.2),
    "msam": Wrapper(sam.MSAM, 1, 1),
    "msam, adaptive": Wrapper(partial(sam.MSAM, adaptive=True), 1, 1),
}


def same(one: Any, other: Any) -> bool:
    """Whether two nests are equal, types and dtypes included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
