"""What the methods reach: recipes, each with one change or none, trained with several seeds.

What there is to run is in studies.py. Some runs are trained at once on a GPU.

    python benchmarks/accuracy.py train table --seeds 3
    python benchmarks/accuracy.py train "cifar100_resnet18_saf method.storage=uint8" --seeds 1
    python benchmarks/accuracy.py keep runs/accuracy
    python benchmarks/accuracy.py unpack runs/kept
    python benchmarks/accuracy.py tables
    python benchmarks/accuracy.py less "digits_noisy method=saf" "digits_noisy method=saf_shuffled"

`train` leaves ordinary runs, which `saltflat report` reads. `keep` copies their figures, every
fifth epoch of them, to `results/accuracy`, but for seeds that are kept there already. `unpack`
makes runs of these again, for `saltflat report`, without their speeds, as they shared a GPU.
`tables` prints what is there, as docs/results*.md have it, and `less` the difference between two
of its rows, paired by seed, with `--teachers` that of the averages, with `--best` that of the best
epochs.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lines import EVERY, GONE, RECIPES, config_of, folder_of, method_of
from record import RESULTS
from studies import STUDIES, Study

from saltflat.core.statistics import Interval, interval, paired
from saltflat.train import Config, DataConfig
from saltflat.train.config import require
from saltflat.train.data import CIFAR, load_data
from saltflat.train.files import markdown, read_json, to_json, write_text
from saltflat.train.folder import CONFIG, RESULT, check_folder, read_config
from saltflat.train.log import read_metrics, write_metrics
from saltflat.train.loop import Interrupted, Run
from saltflat.train.methods import METHODS
from saltflat.train.provenance import train_command, without_folders
from saltflat.train.together import fit_together

KEPT = RESULTS / "accuracy"
FIGURES = {"teachers": "teacher_accuracy", "best": "best_accuracy"}
"""What else than the accuracy after the last epoch rows can be compared by."""


def train(args: argparse.Namespace) -> None:
    def say(path: Path, run: Run) -> None:
        teacher = "" if run.teacher_accuracy is None else f", teacher {run.teacher_accuracy:.2f}"
        print(
            f"{path.parent.name} {path.name}: {run.accuracy:.2f}{teacher}, best "
            f"{run.best_accuracy:.2f}, sharpness {run.sharpness:.4f}, {run.seconds:.0f} s",
            flush=True,
        )

    named = [STUDIES[run].lines if run in STUDIES else (run.strip(),) for run in args.runs]
    lines = dict.fromkeys(line for some in named for line in some)  # each once
    for line in [line for line in lines if GONE & set(line.split()) and line not in args.runs]:
        print(f"left out, as only version 0.1 can train it: {line}")
        del lines[line]
    require(args.seeds >= 1, f"--seeds must be at least 1, got {args.seeds}")
    require(args.first >= 0, f"--first must be 0 or more, got {args.first}")
    if args.data is not None:
        check_data({config_of(line, 0).data.name for line in lines}, args.data)
    # Seed by seed, so that whenever it is stopped there are pairs.
    runs = [
        (config_of(line, seed, args.data), args.out / folder_of(line) / f"seed{seed}")
        for seed in range(args.first, args.first + args.seeds)
        for line in lines
    ]
    for config, folder in runs:
        check_folder(folder, config)
    fit_together([run for run in runs if not (run[1] / RESULT).exists()], args.jobs, say)


def check_data(named: set[str], file: str) -> None:
    """See to it that a file can be the data of some recipes."""
    require(len(named) == 1, f"{file} cannot be {' and '.join(sorted(named))}: name runs of one")
    name = named.pop()
    require(name in CIFAR, f"{file} is for runs of CIFAR, and not of {name}: leave --data out")
    require(file.endswith(".npz"), f"{file} is no .npz")
    classes = load_data(DataConfig(name=file)).num_classes
    require(classes == CIFAR[name][1], f"{file} has {classes} classes, and is not {name}")


def keep(args: argparse.Namespace) -> None:
    folders = sorted({result.parent.parent for result in args.runs.glob(f"*/*/{RESULT}")})
    require(bool(folders), f"no complete run in {args.runs}: name a folder that `train` wrote")
    args.out.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        file = args.out / f"{folder.name}.json"
        known = read_json(file) if file.exists() else {}
        new = [one for one in folder.glob(f"*/{RESULT}") if one.parent.name not in known]
        for result in new:
            config = in_full(read_config(result.parent))
            rows = [
                row
                for row in read_metrics(result.parent)
                if (row["epoch"] + 1) % EVERY == 0 or row["epoch"] + 1 == config.epochs
            ]
            known[result.parent.name] = {
                "config": dataclasses.asdict(config),
                "result": {**read_json(result), "command": train_command(config)},
                "metrics": [{k: _rounded(v) for k, v in row.items()} for row in rows],
            }
        print(f"{file}: {len(new)} more, {len(known)} in all")
        if new:
            seeds = sorted(known, key=lambda seed: int(seed.removeprefix("seed")))
            lines = (f'"{seed}": {without_folders(to_json(known[seed]))}' for seed in seeds)
            write_text(file, "{\n" + ",\n".join(lines) + "\n}\n")


def in_full(config: Config) -> Config:
    """A run's config with every setting of its method, as defaults may change."""
    settings = {**METHODS[config.method.name].settings(), **config.method.settings}
    method = dataclasses.replace(config.method, settings=settings)
    return dataclasses.replace(config, method=method)


def unpack(args: argparse.Namespace) -> None:
    files = sorted(args.kept.glob("*.json"))
    require(bool(files), f"nothing is kept in {args.kept}: `keep` writes there")
    for file in files:
        for seed, run in read_json(file).items():
            folder = args.out / file.stem / seed
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / CONFIG, to_json(run["config"]))
            write_text(folder / RESULT, to_json({**run["result"], "images_per_second": None}))
            write_metrics(folder, run["metrics"])


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def tables(args: argparse.Namespace) -> None:
    found = [(study, text) for study in STUDIES.values() if (text := table(study, args.kept))]
    require(bool(found), f"nothing in {args.kept} makes a table: two rows of a study do")
    for study, text in found:
        print(f"{study.title}\n\n{text}\n")


def table(study: Study, kept: Path = KEPT) -> str:
    """A study as far as it was measured, in Markdown; empty where nothing but its base was."""
    rows = []
    first = study.lines[0]
    measured = {line: found for line in study.lines if (found := results(line, kept))}
    if measured.keys() <= {first}:
        return ""
    for line, found in measured.items():
        accuracy = judged(line, kept)
        gain = None if line == first else difference(line, first, kept)
        teachers = [r["teacher_accuracy"] for r in found.values()]
        rows.append(
            [
                f"`{line}`",
                " ".join(map(str, accuracy)),
                _shown(interval(list(accuracy.values()))),
                "" if gain is None else _shown(gain),
                f"{fmean(r['best_accuracy'] for r in found.values()):.2f}",
                "" if None in teachers else f"{fmean(teachers):.2f}",
                f"{fmean(r['sharpness'] for r in found.values()):.4f}",
                paper_figure(line),
            ]
        )
    head = ["run", "seeds", "last epoch", "difference", "best epoch", "teacher", "sharpness"]
    return markdown([[*head, "paper"], *rows])


def difference(
    line: str, other: str, kept: Path = KEPT, figure: str = "accuracy"
) -> Interval | None:
    """How far one run is above another in the seeds of both; None where there are no such."""
    ours, theirs = (judged(one, kept, figure) for one in (line, other))
    common = sorted(ours.keys() & theirs.keys())
    pairs = [ours[seed] for seed in common], [theirs[seed] for seed in common]
    return paired(*pairs) if common else None


def less(args: argparse.Namespace) -> None:
    lines = (args.line, args.other)
    one, other = (config_of(line, 0).data for line in lines)
    for line in lines:
        require(bool(results(line, args.kept)), f"nothing is kept of {line!r}: see `tables`")
    same = dataclasses.replace(one, cutout=other.cutout) == other  # which a table compares
    require(same, f"{args.line} and {args.other} are of different data")
    found = difference(*lines, args.kept, args.figure)
    print("no seed of both" if found is None else f"{_shown(found)}, n = {found.n}")


def results(line: str, kept: Path = KEPT) -> dict[int, dict[str, Any]]:
    """What came of a run, by seed."""
    file = kept / f"{folder_of(line)}.json"
    runs = read_json(file) if file.exists() else {}
    return {int(seed.removeprefix("seed")): run["result"] for seed, run in runs.items()}


def judged(line: str, kept: Path = KEPT, figure: str = "accuracy") -> dict[int, float]:
    """A figure of its runs; for their accuracy the average's, if the method is about that.

    Where there is no average, its accuracy is the model's.
    """
    found = results(line, kept)
    if figure == "accuracy" and METHODS[method_of(line)].judged_by_teacher:
        figure = "teacher_accuracy"
    if any(result[figure] is None for result in found.values()):
        figure = "accuracy"
    return {seed: result[figure] for seed, result in found.items()}


def _shown(value: Interval) -> str:
    return f"{value.mean:.2f}" if value.n == 1 else str(value)


def paper_figure(line: str) -> str:
    """The paper's accuracy of a recipe, where the run is the recipe as it stands."""
    recipe, *options = line.split()
    found = re.match(r"# paper: (\S+)", (RECIPES / f"{recipe}.yaml").read_text())
    return found[1] if found and not options else ""


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("train")
    one.set_defaults(run=train)
    one.add_argument("runs", nargs="+", help=f"A study ({', '.join(STUDIES)}) or a run.")
    one.add_argument("--seeds", type=int, default=3, help="How many.")
    one.add_argument("--first", type=int, default=0, help="The first seed.")
    one.add_argument(
        "--jobs", type=int, default=3 if torch.cuda.is_available() else 1, help="How many at once."
    )
    one.add_argument("--data", help="An .npz of the recipes' data, instead of a download.")
    one.add_argument("--out", type=Path, default=Path("runs/accuracy"))
    one = commands.add_parser("keep")
    one.set_defaults(run=keep)
    one.add_argument("runs", type=Path)
    one.add_argument("--out", type=Path, default=KEPT)
    one = commands.add_parser("unpack")
    one.set_defaults(run=unpack)
    one.add_argument("out", type=Path)
    one.add_argument("--kept", type=Path, default=KEPT)
    one = commands.add_parser("tables")
    one.set_defaults(run=tables)
    one.add_argument("--kept", type=Path, default=KEPT)
    one = commands.add_parser("less")
    one.set_defaults(run=less)
    one.add_argument("line", help="A run of the tables.")
    one.add_argument("other", help="Another, which is subtracted from it.")
    figure = one.add_mutually_exclusive_group()
    for flag, what in [("teachers", "averages, where there are"), ("best", "models' best epochs")]:
        figure.add_argument(
            f"--{flag}",
            dest="figure",
            action="store_const",
            const=FIGURES[flag],
            default="accuracy",
            help=f"Of the {what}.",
        )
    one.add_argument("--kept", type=Path, default=KEPT)
    args = parser.parse_args(words)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except Interrupted:
        print("stopped and saved; the same command goes on where it stopped")
        sys.exit(130)


if __name__ == "__main__":
    main()
