"""Several runs on one GPU at once: each in its turn puts some steps on a stream of its own.

A small network's step leaves most of a GPU idle, and what is on different streams runs side by
side. Processes would not do: without further measures a GPU serves them one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from saltflat.core.cuda_graph import RandomState, random_state, set_random_state
from saltflat.train.config import Config, require
from saltflat.train.loop import Interrupted, Run, running, stopping
from saltflat.train.ranks import device_of
from saltflat.train.state import check_config

TURN = 16
"""Steps of a turn: enough that the others have work while one run is being evaluated."""


def fit_together(
    runs: Sequence[tuple[Config, Path]], at_once: int, done: Callable[[Path, Run], None]
) -> None:
    """`fit` for several runs, some of them at once; each ends as it would alone.

    Args:
        runs: Configs, and the folders that they go to.
        at_once: How many to have under way.
        done: Told the folder and the figures of each run that is complete.

    Raises:
        ValueError: If one of them cannot be run, as far as can be told before any is begun.
        Interrupted: If it was stopped; the runs that were under way are saved.
        Exception: What one of them failed with; the others that were under way are saved.
    """
    require(at_once >= 1, f"at least 1 run at once, got {at_once}")
    for config, _ in runs:
        check_config(config)
    waiting, going = list(reversed(runs)), list[Turns]()
    stopped: Exception | None = None
    with stopping() as interrupted:

        def ends(*_: int) -> bool:
            return stopped is not None or interrupted()

        while going or (waiting and not ends()):
            if waiting and len(going) < at_once and not ends():
                going.append(Turns(*waiting.pop(), stop=ends))
            for one in list(going):
                try:
                    run = one.turn()
                except Exception as reason:
                    if stopped is None or isinstance(stopped, Interrupted):
                        stopped = reason
                    going.remove(one)
                else:
                    if run is not None:
                        going.remove(one)
                        done(one.folder, run)
    if stopped is not None or waiting:
        raise stopped or Interrupted(waiting[-1][1])


class Turns:
    """A run that takes turns: its stream and its random numbers are its own."""

    def __init__(self, config: Config, folder: Path, stop: Callable[[int, int], bool]) -> None:
        self.folder = folder
        device = device_of(config)
        self._steps = running(config, folder, stop, shown=False)
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._here = [torch.empty(0, device=device)]
        self._random: RandomState | None = None

    def turn(self) -> Run | None:
        """Take some steps; the figures of the run if that was the last of them."""
        if self._random is not None:
            set_random_state(self._random)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            try:
                for _ in range(TURN):
                    next(self._steps)
            except StopIteration as end:
                run: Run = end.value
                return run
        self._random = random_state(self._here)
        return None
