"""Methods side by side in one process: what their training steps cost in time, memory and passes.

Every round takes every method in turn, so that all see the same machine, and a method's speed is
compared with the first one's in the same round.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.core.cuda_graph import tuned
from saltflat.train.augment import TrainLoader
from saltflat.train.config import Config, require
from saltflat.train.data import Data, load_data
from saltflat.train.fast import build_steps, own_stream
from saltflat.train.files import markdown, to_json, write_text
from saltflat.train.provenance import without_folders
from saltflat.train.ranks import device_of, require_one_process
from saltflat.train.state import State, build
from saltflat.train.step import Steps, plain_steps


@dataclass(frozen=True)
class Row:
    """A method's line in the table."""

    method: str
    images_per_second: float
    """The median of the rounds."""
    ratio: float
    """Of the speed to the first method's in the same round; the median."""
    ratio_quartiles: tuple[float, float]
    peak_bytes: int | None
    """What the method, with its model, takes of the GPU's memory at most; None on the CPU."""
    extra_bytes: int
    """What the method keeps between steps, beside the base optimizer."""
    forward_passes: float
    """Counted, a step; of the teacher too. A pass over half of the batch is half a one."""
    backward_passes: float
    seconds: tuple[float, ...]
    """Of each round."""


def bench(
    configs: Mapping[str, Config],
    *,
    rounds: int = 7,
    steps: int = 10,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Measure whole training steps, the loading of the data included.

    Args:
        configs: A config for each name; the first is what the others are compared with.
        rounds: How many are timed, after one that warms up.
        steps: Of a method in a round: a multiple of the interval of one that climbs every few
            steps, so that every round shows its average.
        clock: What gives the time in seconds.

    Returns:
        A row for each config.

    Raises:
        ValueError: If there is nothing to measure, or a config cannot be run.
    """
    require_one_process("bench")
    require(len(configs) > 0, "bench needs a method at least")
    require(rounds >= 1, f"rounds must be at least 1, got {rounds}")
    require(steps >= 1, f"steps must be at least 1, got {steps}")
    load = cache(load_data)  # the methods' data are the same, as a rule
    built = {name: ready(config, load(config.data), steps) for name, config in configs.items()}
    seconds = timed_rounds({name: one.run for name, one in built.items()}, rounds, clock)
    speeds = {
        name: steps * config.data.batch_size / np.array(seconds[name])
        for name, config in configs.items()
    }
    base = speeds[next(iter(configs))]
    rows = []
    for name, one in built.items():
        low, middle, high = np.quantile(speeds[name] / base, [0.25, 0.5, 0.75]).tolist()
        rows.append(
            Row(
                method=name,
                images_per_second=float(np.median(speeds[name])),
                ratio=middle,
                ratio_quartiles=(low, high),
                peak_bytes=one.peak_bytes,
                extra_bytes=one.extra_bytes,
                forward_passes=one.forward_passes,
                backward_passes=one.backward_passes,
                seconds=tuple(seconds[name]),
            )
        )
    return rows


def timed_rounds(
    runs: Mapping[str, Callable[[], None]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """The seconds of each run in each round, after a round that only warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + rounds):
        for name, run in runs.items():
            begin = clock()
            run()
            seconds[name].append(clock() - begin)
    return {name: spent[1:] for name, spent in seconds.items()}


@dataclass(frozen=True)
class Ready:
    """A method that is ready to be timed, and what is known of it before."""

    run: Callable[[], None]
    """A round's steps; all of their work is done when it returns."""
    peak_bytes: int | None
    extra_bytes: int
    forward_passes: float
    backward_passes: float


def ready(config: Config, data: Data, steps: int) -> Ready:
    """Build a method, count its passes, and let it take its first steps.

    Methods that were built before stay where they are, so what is added to the GPU's memory is
    this one's own.
    """
    device = device_of(config)
    on_gpu = device.type == "cuda"
    if on_gpu:
        gc.collect()  # or what is freed later would seem to be this one's saving
        _first_product(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    loader = TrainLoader(data, config.data, config.seed)
    torch.manual_seed(config.seed)
    state, _ = build(config, data, len(loader))
    stream = own_stream(device)
    if state.training.term is not None:
        state.epoch = state.training.term.start_epoch  # from which on all of it is at work
    # Neither a compiled model nor a recorded step would call the hooks.
    eager = plain_steps(dataclasses.replace(config, compile=False), state, loader)
    with stream:
        # What cuDNN chooses for a shape, it keeps: let it choose as it will in recorded steps.
        with nullcontext() if state.plain_because else tuned():
            forward, backward = _count_rows(state, islice(_endless(state, eager), steps))
        state.epoch += 1  # the counted steps were an epoch of their own
        going = _endless(state, build_steps(config, state, data, loader, device))
        next(going)  # in which cuDNN tries what it may not use later

    def run() -> None:
        with stream:
            for _ in islice(going, steps):
                pass
        if on_gpu:
            torch.cuda.synchronize(device)

    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    run()
    return Ready(
        run=run,
        peak_bytes=torch.cuda.max_memory_allocated(device) - before if on_gpu else None,
        extra_bytes=state.training.extra_bytes(),
        forward_passes=forward / (steps * state.batch_size),
        backward_passes=backward / (steps * state.batch_size),
    )


def _first_product(device: torch.device) -> None:
    """Let cuBLAS take its workspaces now, forward and backward: they are no method's own."""
    one = torch.ones(1, 1, device=device, requires_grad=True)
    (one * one).backward()  # the thread that goes backward must know the GPU first
    (one @ one).backward()


def _endless(state: State, steps: Steps) -> Iterator[None]:
    """The steps of one epoch after another, from the state's on."""
    while True:
        state.training.set_epoch(state.epoch)
        state.model.train()
        for _ in steps(state.epoch, 0):
            state.schedule.step()
            yield
        state.epoch += 1


def _count_rows(state: State, steps: Iterator[None]) -> tuple[int, int]:
    """How many rows go forward through the model and its teacher in some steps, and backward."""
    forward, backward = [0], [0]

    def count(module: nn.Module, inputs: Any, logits: Tensor) -> None:
        forward.append(len(logits))
        if logits.requires_grad:
            logits.register_hook(lambda gradient: backward.append(len(gradient)))

    hooks = [model.register_forward_hook(count) for model in state.models().values()]
    for _ in steps:
        pass
    for hook in hooks:
        hook.remove()
    return sum(forward), sum(backward)


def describe(config: Config) -> str:
    """What a step is, in a few words."""
    options = {"channels_last": config.channels_last, "compiled": config.compile}
    how = [config.precision, *(name for name, on in options.items() if on)]
    data = without_folders(config.data.name)
    return f"{config.model} on {data}, batch {config.data.batch_size}, {', '.join(how)}"


def heading(facts: Mapping[str, Any]) -> str:
    """What was measured, where, how often and by which command, in a line."""
    work, hardware, versions = facts["work"], facts["hardware"], facts["versions"]
    number = f"n = {facts['rounds']} rounds of {facts['steps']} steps"
    return f"{work}; {hardware}; {versions}; {number}; {facts['command']}"


def table(rows: list[Row]) -> list[list[str]]:
    """The header and a line for each row."""
    header = ["method", "images/s", "speed", "quartiles", "peak memory", "kept memory", "passes"]
    lines = [header]
    for row in rows:
        low, high = row.ratio_quartiles
        lines.append(
            [
                row.method,
                f"{row.images_per_second:,.0f}",
                f"{row.ratio:.1%}",
                f"{low:.1%} to {high:.1%}",
                "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.1f} MiB",
                f"{row.extra_bytes / 2**20:,.2f} MiB",
                f"{row.forward_passes:.3g} + {row.backward_passes:.3g}",
            ]
        )
    return lines


def write(folder: Path, facts: Mapping[str, Any], rows: list[Row]) -> None:
    """Write bench.json, with every round's seconds, and bench.md."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {**facts, "rows": [dataclasses.asdict(row) for row in rows]}
    write_text(folder / "bench.json", to_json(record, indent=1))
    write_text(folder / "bench.md", f"{heading(facts)}\n\n{markdown(table(rows))}\n")
