"""Processes that call the runner's `fit`; started by test_ranks.py, which looks at what they leave.

The jobs are a pickled list. Each rank goes through all of them, and says of each how it ended.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from saltflat.train import Config, Interrupted, fit
from saltflat.train import state as state_module
from saltflat.train.models import build_model


@dataclass
class Job:
    """A run, or a part of it."""

    config: Config
    folder: Path
    stop: tuple[int, int] | None = None
    """Epoch and steps after which rank 0 is told to stop; the ranks take one step more."""
    signal: int | None = None
    """Which rank 1 sends itself there, instead."""
    differs: dict[str, object] = field(default_factory=dict)
    """What the last rank's config has instead."""


class Block(nn.Module):
    """Two layers and a shortcut."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 7), nn.Linear(7, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.dropout(torch.tanh(self.inner(x))))


def smooth(
    name: str, *, num_classes: int, in_channels: int, image_size: int, initialization: Any
) -> nn.Module:
    """A network without BatchNorm, on which shares of a batch add up to it; or another by name."""
    if name not in ("smooth", "dropout"):
        sizes = {"in_channels": in_channels, "image_size": image_size}
        return build_model(name, num_classes=num_classes, **sizes)
    dropout = 0.3 if name == "dropout" else 0.0
    width = in_channels * image_size**2
    layers = Block(width, dropout), nn.Sequential(Block(width, dropout), nn.LayerNorm(width))
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, num_classes))


def told(job: Job, rank: int):
    """What rank 0 is told to do after a step, or what rank 1 is sent."""
    if job.signal is None:
        return lambda *now: rank == 0 and now == job.stop

    def send(*now: int) -> bool:
        if rank == 1 and now == job.stop:
            os.kill(os.getpid(), job.signal)
            if job.signal == signal.SIGSTOP:
                time.sleep(600)
        return False

    return send


def end(job: Job, rank: int, size: int) -> str:
    """How a job ends."""
    config = replace(job.config, **job.differs) if rank == size - 1 else job.config
    try:
        fit(config, job.folder, stop=told(job, rank))
    except Interrupted:
        return "stopped"
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def main(rank: int, size: int, folder: Path, seconds: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "start_epoch=")
    state_module.build_model = smooth
    said = []
    try:
        store = f"file://{folder / 'store'}"
        limit = timedelta(seconds=float(seconds))
        dist.init_process_group("gloo", store, rank=rank, world_size=size, timeout=limit)
        for job in pickle.loads((folder / "jobs").read_bytes()):
            said.append(end(job, rank, size))
    except BaseException:
        said.append(traceback.format_exc())
    (folder / f"said.{rank}").write_bytes(pickle.dumps(said))
    os._exit(0)  # a group in which something went wrong cannot be left in good order


if __name__ == "__main__":
    size, folder, seconds = sys.argv[1:]
    # Forked, so that torch is imported once.
    context = mp.start_processes(
        main, (int(size), Path(folder), seconds), int(size), join=False, start_method="fork"
    )
    first, *others = context.processes
    first.join()
    for process in others:
        process.join(10)
        process.kill()
