"""Whether MESA is as good when only one step of several has its loss.

The same run with every interval and seed, some of them at once on a GPU.

    python benchmarks/mesa_interval.py --data cifar100.npz --model cifar_resnet18 --epochs 30
    python benchmarks/mesa_interval.py --data digits --model small_cnn --label-noise 0.2 --seeds 10
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import record
import torch

from saltflat.core.statistics import interval, paired
from saltflat.train import Config, DataConfig, MethodConfig, OptimizerConfig
from saltflat.train.loop import Run
from saltflat.train.together import fit_together

CUDA = torch.cuda.is_available()
INTERVALS = {"base": None, "mesa": 1, "mesa, interval 2": 2, "mesa, interval 4": 4}


def work(args: argparse.Namespace, every: int | None, seed: int) -> Config:
    method = MethodConfig("base") if every is None else MethodConfig("mesa", {"interval": every})
    return Config(
        data=DataConfig(
            args.data,
            augment=args.augment,
            batch_size=args.batch,
            label_noise=args.label_noise,
        ),
        model=args.model,
        optimizer=OptimizerConfig(lr=0.05),
        method=method,
        epochs=args.epochs,
        seed=seed,
        precision="bf16" if CUDA else "float32",
        channels_last=CUDA,
        compile=CUDA,
        checkpoint_every=args.epochs,
    )


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[str, list[float]] = {}
    teachers: dict[str, list[float]] = {}
    for name in args.methods:
        runs: dict[str, Run] = {}

        def keep(path: Path, run: Run, runs: dict[str, Run] = runs) -> None:
            runs[path.name] = run

        with tempfile.TemporaryDirectory() as folder:
            fit_together(
                [(work(args, INTERVALS[name], s), Path(folder, str(s))) for s in range(args.seeds)],
                3 if CUDA else 1,
                keep,
            )
        found[name] = [runs[str(seed)].accuracy for seed in range(args.seeds)]
        teachers[name] = [runs[str(seed)].teacher_accuracy or 0.0 for seed in range(args.seeds)]
        print(name, found[name], teachers[name], flush=True)
    full = found.get("mesa", [])
    return [
        {
            "method": name,
            "accuracy, last epoch": str(interval(figures)),
            "teacher": "" if name == "base" else str(interval(teachers[name])),
            "difference to every step": (
                str(paired(figures, full)) if full and "interval" in name else ""
            ),
            "seeds": " ".join(f"{figure:.2f}" for figure in figures),
        }
        for name, figures in found.items()
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="small_cnn")
    parser.add_argument("--augment", default="none")
    parser.add_argument("--label-noise", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=list(INTERVALS))
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    rows = measure(args)
    noise = f", {args.label_noise:.0%} of the labels flipped" if args.label_noise else ""
    data = Path(args.data).stem
    heading = f"{data}, {args.model}, {args.epochs} epochs{noise}, n = {args.seeds} seeds, 95 %:"
    noisy = "_noisy" if args.label_noise else ""
    record.write(
        f"mesa_interval_{data}{noisy}", "MESA in one step of several", {heading: rows}, args.out
    )
