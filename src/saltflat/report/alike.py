"""Which landscapes may stand side by side: those that were made alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from saltflat.landscape import Surface
from saltflat.report.records import Run, Setting

_MADE_WITH = ("kind", "seed", "span", "batchnorm", "rows", "data", "loss")
"""What changes the losses; how many places there are does not."""


class Landscape(NamedTuple):
    """A run's, with its method's label."""

    label: str
    seed: int
    surface: Surface


def alike(
    setting: Setting, get: Callable[[Run], Surface | None]
) -> tuple[list[Landscape], list[str]]:
    """Those of a setting's landscapes that were made like the most of them.

    Returns:
        The landscapes; and a sentence for each that is left out, which may be for want of any loss
        that is a number, or that shows earlier weights than the run's last.
    """
    found, notes = [], []
    for method in setting.methods:
        for run in method.runs:
            if (surface := get(run)) is None:
                continue
            name = f"{method.label}, seed {run.config['seed']}"
            if not np.isfinite(surface.losses).any():
                notes.append(f"{name} is left out: no loss of its landscape is a number.")
                continue
            found.append((name, Landscape(method.label, run.config["seed"], surface)))
            epochs, done = surface.provenance.get("epochs"), run.epochs
            if epochs is not None and epochs < done:
                notes.append(f"{name} is as it was after {epochs} of {done} epochs.")
    most = Counter(_made(one) for _, one in found).most_common(1)
    for name, one in found:
        if differing := _differing(_made(one), most[0][0]):
            notes.append(f"{name} is left out: {differing}.")
    return [one for _, one in found if _made(one) == most[0][0]], notes


def _made(landscape: Landscape) -> tuple[Any, ...]:
    settings = landscape.surface.provenance["settings"]
    return tuple(settings.get(name) for name in _MADE_WITH)


def _differing(own: tuple[Any, ...], others: tuple[Any, ...]) -> str:
    said = [
        "its images are others" if name == "data" else f"its {name} is {mine}, not {theirs}"
        for name, mine, theirs in zip(_MADE_WITH, own, others, strict=True)
        if mine != theirs
    ]
    return ", ".join(said)
