"""What one `saf(logits, index)` costs, beside the cross-entropy of the same logits.

Forward and backward to the logits, in rounds that take every contender in turn; the median and the
quartiles of the rounds. On a GPU also the kernels and copies that one call launches, and the store
in host memory and in a file.

    python benchmarks/call_cost.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from saltflat import SAF
from saltflat.codecs import CODECS

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From logits, labels and index, the last as a loader gives it, to a loss."""


def contenders(samples: int, classes: int, folder: Path) -> dict[str, Call]:
    """The cross-entropy, and SAF in every storage and place, all in an epoch with references."""
    calls: dict[str, Call] = {"cross-entropy": lambda z, y, _: cross_entropy(z, y)}
    places: dict[str, dict[str, Any]] = {"with the logits": {}}
    if CUDA:
        places |= {"host memory": {"device": "cpu"}, "file": {"path": folder / "table"}}
    for place, where in places.items():
        for storage in CODECS if place == "with the logits" else ["float16"]:
            saf = SAF(samples, classes, lag=1, start_epoch=1, storage=storage, **where)
            saf.set_epoch(0)
            for index in torch.arange(samples).split(8192):
                saf(torch.randn(len(index), classes, device=DEVICE), index)
            saf.set_epoch(1)
            calls[f"SAF, {storage}, {place}"] = call_of(saf, torch.device("cpu"))
            if CUDA and place == "with the logits":
                calls[f"SAF, {storage}, {place}, index on the GPU"] = call_of(saf, DEVICE)
    return calls


def call_of(saf: SAF, index_device: torch.device) -> Call:
    return lambda logits, _, index: saf(logits, index.to(index_device, non_blocking=True))


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def launches(call: Callable[[], None]) -> int:
    """Kernels, copies and fills that a call puts on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        wait()
    return sum("CUDA" in str(event.device_type) for event in profile.events() or [])


def measure(
    batch: int, classes: int, samples: int, rounds: int, repeats: int
) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, classes, generator=generator).to(DEVICE).requires_grad_()
    labels = torch.randint(classes, (batch,), generator=generator).to(DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        calls = contenders(samples, classes, Path(folder))
        times: dict[str, list[float]] = {name: [] for name in calls}
        counts: dict[str, int] = {}

        # Without repetition, as an epoch goes: a row read twice would have no reference.
        order = torch.randperm(samples, generator=generator)
        taken = dict.fromkeys(calls, 0)

        def run(name: str, times: int) -> None:
            for _ in range(times):
                start = taken[name]
                taken[name] = start + batch if start + 2 * batch <= samples else 0
                logits.grad = None
                calls[name](logits, labels, order[start : start + batch]).backward()

        for round_number in range(rounds + 1):
            for name in calls:
                wait()
                begin = time.perf_counter()
                run(name, repeats)
                wait()
                if round_number:  # the first round warms up
                    times[name].append((time.perf_counter() - begin) / repeats)
        for name in calls:
            counts[name] = launches(partial(run, name, 1)) if CUDA else 0
    base = torch.tensor(times["cross-entropy"]).median()
    rows = []
    for name, seconds in times.items():
        low, median, high = torch.tensor(seconds).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        row = {
            "call": name,
            "microseconds": f"{1e6 * median:,.0f}",
            "quartiles": f"{1e6 * low:,.0f} to {1e6 * high:,.0f}",
            "of cross-entropy": f"{median / base:.2f}",
        }
        rows.append({**row, "launches": counts[name]} if CUDA else row)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=102_400)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    rows = measure(args.batch, args.classes, args.samples, args.rounds, args.repeats)
    heading = (
        f"Batch {args.batch}, {args.classes} classes, float32 logits, {args.samples:,} samples, "
        f"n = {args.rounds} rounds of {args.repeats} calls; forward and backward to the logits:"
    )
    record.write("call_cost", "The cost of one call of SAF", {heading: rows}, args.out)
