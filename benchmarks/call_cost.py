"""What one `saf(logits, index)` costs, beside the cross-entropy of the same logits.

Forward and backward to the logits, in rounds that take every contender in turn; the median and the
quartiles of the rounds. On a GPU also the kernels and copies that one call launches, and the memory
on the host.

    python benchmarks/call_cost.py
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from saltflat import SAF
from saltflat.memory import CODECS

CUDA = torch.cuda.is_available()
CPU = torch.device("cpu")
DEVICE = torch.device("cuda") if CUDA else CPU
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From logits, labels and index, the last as a loader gives it, to a loss."""


class Contender:
    """A loss over an endless row of epochs, each sample once an epoch."""

    def __init__(self, loss: Call, order: Tensor, batch: int, saf: SAF | None = None) -> None:
        self.loss, self.saf = loss, saf
        self.batches = [b for b in order.split(batch) if len(b) == batch]
        self.taken = 0

    def __call__(self, logits: Tensor, labels: Tensor) -> None:
        epoch, step = divmod(self.taken, len(self.batches))
        if self.saf is not None and step == 0:
            self.saf.set_epoch(epoch)
        logits.grad = None
        self.loss(logits, labels, self.batches[step]).backward()
        self.taken += 1


def contenders(samples: int, classes: int, batch: int) -> dict[str, Contender]:
    """The cross-entropy, and SAF in every storage and place."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    kinds: list[tuple[str, dict[str, Any], torch.device]] = [
        (f"{storage}, with the logits", {"storage": storage}, CPU) for storage in CODECS
    ]
    if CUDA:
        kinds += [
            ("float16, with the logits, index on the GPU", {}, DEVICE),
            ("float16, host memory", {"device": "cpu"}, CPU),
        ]
    found = {"cross-entropy": Contender(lambda z, y, _: cross_entropy(z, y), order, batch)}
    for name, where, index_device in kinds:
        saf = SAF(samples, classes, lag=1, start_epoch=0, **where)
        found[f"SAF, {name}"] = Contender(call_of(saf, index_device), order, batch, saf)
    return found


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the first epoch has no references
        calls = contenders(samples, classes, batch)
        for call in calls.values():  # an epoch to fill the memory and warm up
            for _ in call.batches:
                call(logits, labels)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                wait()
                begin = time.perf_counter()
                for _ in range(repeats):
                    call(logits, labels)
                wait()
                times[name].append((time.perf_counter() - begin) / repeats)
        counts = {
            name: launches(partial(call, logits, labels)) if CUDA else 0
            for name, call in calls.items()
        }
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
