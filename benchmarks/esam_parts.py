"""Where a step of ESAM spends its time: each kind of pass that it is made of, timed alone.

python benchmarks/esam_parts.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import record
import torch
from sam_cost import CUDA, DEVICE, build, wait
from torch import Tensor
from torch.nn.functional import cross_entropy


def passes(model_name: str, size: int, batch: int) -> dict[str, Callable[[], None]]:
    """The passes of a step, by what they are."""
    model = build(model_name, 100, size <= 64)
    x = torch.randn(batch, 3, size, size, device=DEVICE).to(memory_format=torch.channels_last)
    y = torch.randint(100, (batch,), device=DEVICE)
    half = torch.arange(0, batch, 2, device=DEVICE)
    parameters = list(model.parameters())

    def losses(images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            return cross_entropy(model(images), labels, reduction="none")

    def backward(images: Tensor, labels: Tensor) -> None:
        model.zero_grad()
        losses(images, labels).mean().backward()

    def without_some() -> None:
        for i, parameter in enumerate(parameters):
            parameter.requires_grad_(i % 5 < 3)
        backward(x, y)
        for parameter in parameters:
            parameter.requires_grad_(True)

    def forward() -> None:
        with torch.no_grad():
            losses(x, y)

    return {
        "forward and backward": lambda: backward(x, y),
        "the same without the gradients of 40 % of the tensors": without_some,
        "forward without gradient": forward,
        "forward and backward of half of the batch": lambda: backward(x[half], y[half]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    calls = passes(args.model, args.size, args.batch)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(args.rounds + 1):
        for name, call in calls.items():
            wait()
            begin = time.perf_counter()
            for _ in range(5):
                call()
            wait()
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - begin) / 5)
    whole = torch.tensor(times["forward and backward"]).median()
    rows = []
    for name, seconds in times.items():
        middle = torch.tensor(seconds).median()
        share = f"{middle / whole:.0%}"
        rows.append({"pass": name, "ms": f"{1e3 * middle:.1f}", "of the whole": share})
    heading = (
        f"{args.model}, {args.size} px, batch {args.batch}, channels_last, eager, median of "
        f"{args.rounds} rounds of 5:"
    )
    record.write("esam_parts", "The parts of a step of ESAM", {heading: rows}, args.out)
