"""Methods side by side: the same data, seeds and budget, and an honest table.

Speeds are measured apart from the runs, by `bench`. Runs that are complete are kept, so an
interrupted comparison goes on.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch

from saltflat.core.statistics import Interval, interval, paired, verdict
from saltflat.train.bench import bench
from saltflat.train.config import Config, MethodConfig
from saltflat.train.files import markdown, read_json, to_json, write_text
from saltflat.train.folder import RESULT, check_folder
from saltflat.train.loop import fit
from saltflat.train.methods import METHODS, check_method
from saltflat.train.provenance import provenance
from saltflat.train.ranks import device_of, require_one_process
from saltflat.train.together import fit_together

SUMMARY, TABLE = "summary.json", "table.md"
Speeds = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Row:
    """A method's line in the table."""

    method: str
    accuracy: Interval
    """After the last epoch, in percent; of the moving average for a method that is about it."""
    best: float
    """Mean of the best epochs, which were chosen on the test set."""
    teacher: float | None
    """Mean accuracy of the moving average, where there is one."""
    difference: Interval | None
    """To the base, paired by seed."""
    images_per_second: float
    """In the rounds that took every method in turn; the median."""
    speed: float
    """As a share of the base's in the same round; the median."""
    extra_bytes: int
    """What the method keeps between steps, beside the base optimizer."""
    sharpness: float
    """SAM's, rho 0.05, on training images, mean over the seeds."""
    epochs: int


def compare(
    config: Config,
    methods: list[MethodConfig],
    folder: Path | str,
    *,
    seeds: int = 3,
    jobs: int = 1,
    budget: Literal["epochs", "time"] = "epochs",
    command: str = "",
    say: Callable[[str], None] = print,
) -> list[Row]:
    """Train every method with every seed and sum it up.

    Args:
        config: What all have in common; its method and seed do not matter.
        methods: The methods; the first is the base that the others are compared with.
        folder: Where the runs, summary.json and table.md go. Complete runs there are kept.
        seeds: How many, from the config's own.
        jobs: How many runs at once: each in a process of its own, or on a GPU on its own stream.
        budget: "time": a method slower than the base trains for as many epochs fewer.
        command: The one that was given, for the record.
        say: Told a line about each run.

    Returns:
        A row for each method.

    Raises:
        ValueError: If something cannot be run, before anything is.
    """
    require_one_process("compare")
    names = [method.name for method in methods]
    if len(set(names)) < len(names) or not names or seeds < 1 or jobs < 1:
        raise ValueError(
            "methods must be different ones, and seeds and jobs at least 1, got "
            f"methods {names}, seeds {seeds}, jobs {jobs}"
        )
    folder = Path(folder)
    configs = {m.name: dataclasses.replace(config, method=m) for m in methods}
    for one in configs.values():
        check_method(one.method)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # speeds, and what is told of them, as of one of the jobs
    try:
        speeds, made = _speeds(folder, configs), provenance(command, device_of(config))
    finally:
        torch.set_num_threads(before)
    if budget == "time":
        configs = {
            name: dataclasses.replace(
                one, epochs=max(1, round(one.epochs * min(1, speeds[name]["ratio"])))
            )
            for name, one in configs.items()
        }
    numbers = range(config.seed, config.seed + seeds)
    runs = [
        (dataclasses.replace(one, seed=seed), folder / name / f"seed{seed}")
        for seed in numbers
        for name, one in configs.items()
    ]
    for one, path in runs:
        check_folder(path, one)
    open_runs = [run for run in runs if not (run[1] / RESULT).exists()]
    _run_all(open_runs, jobs, threads, len(runs), say)
    rows = _rows(folder, configs, speeds, numbers)
    _write(folder, config, rows, made)
    return rows


def _run_all(
    runs: list[tuple[Config, Path]],
    jobs: int,
    threads: int,
    total: int,
    say: Callable[[str], None],
) -> None:
    done = total - len(runs)
    if done:
        say(f"{done} of {total} runs were complete already")
    if jobs == 1 or not runs:
        for number, (config, path) in enumerate(runs, done + 1):
            say(f"[{number}/{total}] {_line(path, dataclasses.asdict(fit(config, path)))}")
        return
    if device_of(runs[0][0]).type == "cuda":
        ended = count(done + 1)
        fit_together(
            runs,
            jobs,
            lambda path, run: say(
                f"[{next(ended)}/{total}] {_line(path, dataclasses.asdict(run))}"
            ),
        )
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        waiting, working = list(reversed(runs)), dict[Future[Any], Path]()
        while waiting or working:
            # No more than can work: what is handed over early could not be taken back.
            while waiting and len(working) < jobs:
                config, path = waiting.pop()
                working[pool.submit(_fit_alone, config, path, threads, os.getpid())] = path
            for future in wait(working, return_when=FIRST_COMPLETED).done:
                done += 1
                say(f"[{done}/{total}] {_line(working.pop(future), future.result())}")


def _fit_alone(config: Config, path: Path, threads: int, parent: int) -> dict[str, Any]:
    """A run in a process of its own, which stops, saved, if it is left alone."""
    torch.set_num_threads(threads)
    return dataclasses.asdict(fit(config, path, stop=lambda *_: os.getppid() != parent))


def _line(path: Path, result: dict[str, Any]) -> str:
    accuracy, seconds = result["accuracy"], result["seconds"]
    diverged = ", DIVERGED: its loss is not a number" if result["diverged"] else ""
    return f"{path.parent.name} {path.name}: {accuracy:.2f} % in {seconds:.1f} s{diverged}"


def _speeds(folder: Path, configs: dict[str, Config]) -> Speeds:
    """How fast each method is, and as a share of the first one's; kept once measured."""
    path = folder / "speeds.json"
    wanted = json.loads(to_json({name: dataclasses.asdict(c) for name, c in configs.items()}))
    known = read_json(path) if path.exists() else {}
    if known.get("configs") == wanted:
        return dict(known["speeds"])
    speeds = {
        row.method: {"images_per_second": row.images_per_second, "ratio": row.ratio}
        for row in bench(configs)
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, to_json({"configs": wanted, "speeds": speeds}))
    return speeds


def _rows(folder: Path, configs: dict[str, Config], speeds: Speeds, seeds: range) -> list[Row]:
    results = {
        name: [read_json(folder / name / f"seed{seed}" / RESULT) for seed in seeds]
        for name in configs
    }
    judged = {
        name: "teacher_accuracy" if METHODS[name].judged_by_teacher else "accuracy"
        for name in configs
    }
    accuracies = {name: [r[judged[name]] for r in found] for name, found in results.items()}
    base = next(iter(configs))
    rows = []
    for name, found in results.items():
        teachers = [r["teacher_accuracy"] for r in found if r["teacher_accuracy"] is not None]
        rows.append(
            Row(
                method=name,
                accuracy=interval(accuracies[name]),
                best=fmean(r["best_accuracy"] for r in found),
                teacher=fmean(teachers) if teachers else None,
                difference=None if name == base else paired(accuracies[name], accuracies[base]),
                images_per_second=speeds[name]["images_per_second"],
                speed=speeds[name]["ratio"],
                extra_bytes=found[0]["extra_bytes"],
                sharpness=fmean(r["sharpness"] for r in found),
                epochs=configs[name].epochs,
            )
        )
    return rows


def _write(folder: Path, config: Config, rows: list[Row], facts: dict[str, str]) -> None:
    summary = {
        "provenance": facts,
        "config": dataclasses.asdict(config),
        "rows": [dataclasses.asdict(row) for row in rows],
        "verdicts": verdicts(rows),
    }
    write_text(folder / SUMMARY, to_json(summary, indent=1))
    notes = "\n".join(f"- {sentence}" for sentence in verdicts(rows))
    write_text(folder / TABLE, f"{describe(config)}\n\n{markdown(table(rows))}\n\n{notes}\n")


def describe(config: Config) -> str:
    """What was compared, in a line."""
    data = config.data
    noise = f", {data.label_noise:.0%} of training labels flipped" if data.label_noise else ""
    size = f", {data.train_size} training images" if data.train_size else ""
    return f"{data.name}{size}{noise}; {config.model}, {config.epochs} epochs"


def table(rows: list[Row]) -> list[list[str]]:
    """The header and a line for each row."""
    lines = [
        [
            *("method", "accuracy, last epoch", "difference to the first", "best epoch", "teacher"),
            *("images/s", "speed", "kept memory", "sharpness", "epochs"),
        ]
    ]
    for row in rows:
        lines.append(
            [
                row.method,
                str(row.accuracy),
                "" if row.difference is None else str(row.difference),
                f"{row.best:.2f}",
                "" if row.teacher is None else f"{row.teacher:.2f}",
                f"{row.images_per_second:,.0f}",
                f"{row.speed:.0%}",
                f"{row.extra_bytes / 2**20:.2f} MiB",
                f"{row.sharpness:.4f}",
                str(row.epochs),
            ]
        )
    return lines


def verdicts(rows: list[Row]) -> list[str]:
    """A sentence for each method but the base."""
    base = rows[0].method
    return [verdict(r.method, base, r.difference) for r in rows if r.difference is not None]
