"""Small problems that the tests train on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from saltflat import MESA, SAF, with_index

SAMPLES, FEATURES, CLASSES = 24, 6, 4


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


def batches(epoch: int, batch_size: int = 8) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """An epoch's batches in an order that depends on the epoch alone."""
    generator = torch.Generator().manual_seed(epoch)
    return iter(DataLoader(with_index(dataset()), batch_size, shuffle=True, generator=generator))


class Run:
    """A training run by hand: model, optimizer, and perhaps SAF or MESA."""

    def __init__(self, make_term: Callable[[nn.Module], SAF | MESA] | None = None) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.term = make_term(self.model) if make_term else None
        self.losses: list[Tensor] = []

    def epoch(self, epoch: int, skip: int = 0, stop: int | None = None) -> None:
        """Train on batches skip..stop of an epoch."""
        if self.term is not None:
            self.term.set_epoch(epoch)
        for index, x, y in list(batches(epoch))[skip:stop]:
            logits = self.model(x)
            loss = cross_entropy(logits, y)
            if isinstance(self.term, SAF):
                loss = loss + self.term(logits, index)
            if isinstance(self.term, MESA):
                loss = loss + self.term(logits, x)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if isinstance(self.term, MESA):
                self.term.update(self.model)
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


def saf(model: nn.Module, **kwargs: Any) -> SAF:
    """SAF for the small problem, starting early."""
    settings = {"lag": 2, "start_epoch": 2, **kwargs}
    return SAF(SAMPLES, CLASSES, **settings)


def mesa(model: nn.Module, **kwargs: Any) -> MESA:
    """MESA for the small problem, starting early."""
    return MESA(model, **{"start_epoch": 2, "decay": 0.9, **kwargs})


TERMS: dict[str, Callable[..., SAF | MESA]] = {"saf": saf, "mesa": mesa}
