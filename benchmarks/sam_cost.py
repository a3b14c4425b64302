"""What a step of each of the SAM family costs, as a ratio to the base optimizer's.

Synthetic images, whole training steps, in rounds that take every method in turn; the median and the
quartiles of the rounds' ratios to the base's in the same round. Rounds are of ten steps, so that a
method that climbs every fifth step shows its average.

    python benchmarks/sam_cost.py --model resnet18 --size 32 --batch 128
    python benchmarks/sam_cost.py --model resnet50 --size 224 --batch 128
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from saltflat.sam import ASAM, ESAM, GSAM, MSAM, SAM, LookSAM

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
METHODS: dict[str, Any] = {
    "base (SGD)": lambda base, model: base,
    "SAM": lambda base, model: SAM(base, model=model),
    "ASAM": lambda base, model: ASAM(base, model=model),
    "GSAM": lambda base, model: GSAM(base, model=model),
    "ESAM": lambda base, model: ESAM(base, model=model),
    "LookSAM": lambda base, model: LookSAM(base, model=model),
    "MSAM": lambda base, model: MSAM(base, model=model),
}
PAPER = {"SAM": "49-51 %", "ESAM": "62-64 %", "GSAM": "48 %", "LookSAM": "83 % (ViT-S/32)"}
"""Speed as a share of the base's: tables 1 and 2 of the SAF paper."""


def build(name: str, classes: int, small: bool) -> nn.Module:
    """A torchvision model; with the CIFAR stem for small images."""
    import torchvision

    model: Any = torchvision.models.get_model(name, num_classes=classes)
    if small:
        model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    placed: nn.Module = model.to(DEVICE, memory_format=torch.channels_last)
    return placed


def stepper(name: str, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Any]:
    """One training step of a method."""
    base = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=5e-4)
    optimizer = METHODS[name](base, model)

    def losses(rows: Tensor | None, reduction: str = "none") -> Tensor:
        images, labels = (x, y) if rows is None else (x[rows], y[rows])
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=CUDA):
            return cross_entropy(model(images), labels, reduction=reduction)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = losses(None, "mean")
        loss.backward()
        return loss

    return lambda: optimizer.step(losses if name == "ESAM" else closure)


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def measure(model: str, size: int, batch: int, rounds: int, repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    x = torch.randn(batch, 3, size, size, device=DEVICE).to(memory_format=torch.channels_last)
    y = torch.randint(100, (batch,), device=DEVICE)
    steps = {name: stepper(name, build(model, 100, size <= 64), x, y) for name in METHODS}
    for step in steps.values():
        for _ in range(repeats):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            wait()
            begin = time.perf_counter()
            for _ in range(repeats):
                step()
            wait()
            times[name].append((time.perf_counter() - begin) / repeats)
    base = torch.tensor(times["base (SGD)"])
    rows = []
    for name, seconds in times.items():
        share = base / torch.tensor(seconds)
        low, middle, high = share.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        rows.append(
            {
                "method": name,
                "images/s": f"{batch / torch.tensor(seconds).median().item():,.0f}",
                "of the base's speed": f"{middle:.1%}",
                "quartiles": f"{low:.1%} to {high:.1%}",
                "the paper": PAPER.get(name, ""),
            }
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    rows = measure(args.model, args.size, args.batch, args.rounds, args.repeats)
    precision = "bf16 autocast" if CUDA else "float32"
    heading = (
        f"{args.model}, {args.size} px, batch {args.batch}, {precision}, channels_last, eager, "
        f"n = {args.rounds} rounds of {args.repeats} steps:"
    )
    theme = f"sam_cost_{args.model}_{args.size}px"
    record.write(theme, "The cost of the SAM family", {heading: rows}, args.out)
