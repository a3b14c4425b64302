"""What the methods reach: recipes, each with one change or none, trained with several seeds.

A run is a recipe's name and the options that differ from it; some are trained at once on a GPU.

    python benchmarks/accuracy.py train cifar100_resnet18_base cifar100_resnet18_saf --seeds 3
    python benchmarks/accuracy.py train "cifar100_resnet18_saf method.storage=uint8" --seeds 1
    python benchmarks/accuracy.py train "cifar100_resnet18_base method=label_smoothing" --seeds 1
    python benchmarks/accuracy.py keep runs/accuracy

`train` leaves ordinary runs, which `saltflat report` reads; `keep` copies their figures, every
fifth epoch of them, to `results/accuracy`, which `saltflat report` reads as well.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
import yaml
from record import RESULTS

from saltflat.train import Config, DataConfig, MethodConfig, OptimizerConfig
from saltflat.train.files import write_text
from saltflat.train.folder import CONFIG, RESULT
from saltflat.train.log import read_metrics, write_metrics
from saltflat.train.loop import Run
from saltflat.train.provenance import without_folders
from saltflat.train.together import fit_together

RECIPES = Path(__file__).parent.parent / "recipes"
KEPT = RESULTS / "accuracy"
EVERY = 5
FAST: dict[str, Any] = {"precision": "bf16", "channels_last": True, "compile": True}
"""How runs are made on a GPU, unless an option says otherwise."""


def config_of(line: str, seed: int, data: str | None) -> Config:
    """A run: a recipe's name, and options as data.cutout=16, method=ema or method.weight=0.3."""
    recipe, *options = line.split()
    values: dict[str, Any] = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    values = {**(FAST if torch.cuda.is_available() else {}), **values, "seed": seed}
    method = values.setdefault("method", {"name": "base"})
    for option in options:
        key, text = option.split("=")
        value, (section, _, name) = yaml.safe_load(text), key.partition(".")
        if key == "method":
            method |= {"name": value, "settings": {}}
        elif section == "method":
            method.setdefault("settings", {})[name] = value
        elif name:
            values.setdefault(section, {})[name] = value
        else:
            values[key] = value
    if data is not None:
        values["data"]["name"] = data
    kinds = {"data": DataConfig, "optimizer": OptimizerConfig, "method": MethodConfig}
    parts = {name: kinds[name](**values.pop(name, {})) for name in kinds}
    config = Config(**parts, **values, track_sharpness=10)
    return dataclasses.replace(config, checkpoint_every=config.epochs)


def folder_of(line: str) -> str:
    """Where its runs go.

    Example:
        >>> folder_of("cifar100_resnet18_saf method.storage=uint8 epochs=60")
        'cifar100_resnet18_saf-storage_uint8-epochs_60'
    """
    recipe, *options = line.split()
    changes = (option.split("=") for option in options)
    return "-".join([recipe, *(f"{key.split('.')[-1]}_{value}" for key, value in changes)])


def train(args: argparse.Namespace) -> None:
    def say(path: Path, run: Run) -> None:
        teacher = "" if run.teacher_accuracy is None else f", teacher {run.teacher_accuracy:.2f}"
        print(
            f"{path.parent.name} {path.name}: {run.accuracy:.2f}{teacher}, best "
            f"{run.best_accuracy:.2f}, sharpness {run.sharpness:.4f}, {run.seconds:.0f} s",
            flush=True,
        )

    runs = [
        (config_of(line, seed, args.data), args.runs / folder_of(line) / f"seed{seed}")
        for line in args.lines
        for seed in range(args.first, args.first + args.seeds)
    ]
    fit_together([run for run in runs if not (run[1] / RESULT).exists()], args.jobs, say)


def keep(args: argparse.Namespace) -> None:
    for result in sorted(args.runs.glob(f"*/*/{RESULT}")):
        run = result.parent
        kept = args.out / run.parent.name / run.name
        kept.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, RESULT):
            write_text(kept / name, without_folders((run / name).read_text()))
        rows = [row for row in read_metrics(run) if (row["epoch"] + 1) % EVERY == 0]
        write_metrics(kept, [{k: _rounded(v) for k, v in row.items()} for row in rows])
        print(kept)


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("train")
    one.set_defaults(run=train)
    one.add_argument("lines", nargs="+", help="A recipe's name, and what is to differ from it.")
    one.add_argument("--seeds", type=int, default=3)
    one.add_argument("--first", type=int, default=0, help="The first seed.")
    one.add_argument("--jobs", type=int, default=3 if torch.cuda.is_available() else 1)
    one.add_argument("--data", help="An .npz of the recipes' data, instead of a download.")
    one.add_argument("--runs", type=Path, default=Path("runs/accuracy"))
    one = commands.add_parser("keep")
    one.set_defaults(run=keep)
    one.add_argument("runs", type=Path)
    one.add_argument("--out", type=Path, default=KEPT)
    args = parser.parse_args()
    args.run(args)
