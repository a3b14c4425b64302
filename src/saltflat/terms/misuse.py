"""Wrong use of a term, noticed from what it counted. Each kind warns once."""

from __future__ import annotations

import sys
import warnings


class Misuse:
    """The warnings of one term.

    Args:
        owner: The term's name.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._said: set[str] = set()

    def no_reference(self, epoch: int) -> None:
        """The loss was on, and no row had a reference."""
        self._warn(
            "no_reference",
            f"no row of epoch {epoch} had a reference, so the loss was 0. Call set_epoch once an "
            "epoch, with consecutive numbers, and give each sample the same index in every epoch",
        )

    def few_samples(self, epoch: int, visits: int, written: int) -> None:
        """Many rows shared an index."""
        self._warn(
            "few_samples",
            f"epoch {epoch} had {visits} rows but only {written} distinct indices. Sampling with "
            "replacement leaves samples out. Colliding indices mix samples: use with_index("
            "ConcatDataset([a, b])), not ConcatDataset([with_index(a), with_index(b)]). Made-up "
            "indices, such as labels or torch.arange(batch), mix samples too. An epoch that is cut "
            "short is fine where a step calls its closure twice, as SAM does",
        )

    def no_epoch(self, epoch: int, rows: int) -> None:
        """An epoch does not end."""
        self._warn(
            "no_epoch",
            f"{rows} rows since set_epoch({epoch}). Call it at the start of every epoch, or the "
            "loss never starts",
        )

    def no_update(self) -> None:
        """The average of the weights never moved."""
        self._warn(
            "no_update",
            "the teacher still is the initial model. Call mesa.update(model) after every "
            "optimizer.step()",
        )

    def _warn(self, kind: str, message: str) -> None:
        if kind in self._said:
            return
        self._said.add(kind)
        level, frame = 1, sys._getframe()
        while frame.f_back and frame.f_globals["__name__"].startswith(("saltflat.", "torch.")):
            level, frame = level + 1, frame.f_back
        warnings.warn(f"{self._owner}: {message}", stacklevel=level)  # the user's own line
