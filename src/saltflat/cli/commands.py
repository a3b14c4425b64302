"""What each command does: of the runner and the report, what is asked for, and what is said."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table

from saltflat.cli.options import (
    BenchOptions,
    CompareOptions,
    MethodsOptions,
    SharpnessOptions,
    TrainOptions,
)


def _split(options: Namespace, kind: type[Any]) -> tuple[Any, Any]:
    """A Config and the command's own options, of what was parsed."""
    from saltflat.train import Config, DataConfig, MethodConfig, OptimizerConfig

    nested = {"data": DataConfig, "optimizer": OptimizerConfig, "method": MethodConfig}
    values = options.as_dict()
    for name, cls in nested.items():
        part = {k: tuple(v) if isinstance(v, list) else v for k, v in values[name].items()}
        values[name] = cls(**part)
    values["log"] = tuple(values["log"])
    config = Config(**{f.name: values[f.name] for f in fields(Config)})
    own = {f.name: values[f.name] for f in fields(kind)}
    return config, kind(**own)


def _chosen(config: Any, own: MethodsOptions) -> list[Any]:
    """The methods of a command, with a recipe's settings and the command's own."""
    from saltflat.train import MethodConfig
    from saltflat.train.methods import check_method

    if len(set(own.methods)) < len(own.methods):
        raise ValueError(f"methods must be different ones, got {', '.join(own.methods)}")
    settings = own.settings or {}
    _require_chosen("settings", settings, own)
    recipe = {config.method.name: config.method.settings}
    methods = [MethodConfig(n, {**recipe.get(n, {}), **settings.get(n, {})}) for n in own.methods]
    for method in methods:
        check_method(method)
    return methods


def _require_chosen(what: str, given: dict[str, Any], own: MethodsOptions) -> None:
    if unknown := given.keys() - set(own.methods):
        raise ValueError(f"{what} for {', '.join(sorted(unknown))}, not among the methods")


def train(options: Namespace) -> None:
    from saltflat.train import Config, Interrupted, fit
    from saltflat.train.folder import read_config
    from saltflat.train.ranks import is_first, started

    config, own = _split(options, TrainOptions)
    if own.resume is not None:
        if config != Config() or own.out is not None:
            raise ValueError("--resume goes on with the run's own config: leave other options out")
        config = read_config(Path(own.resume))
    folder = own.resume or own.out
    if folder is None:
        name = Path(config.data.name).stem.replace(":", "_")
        folder = f"runs/{name}_{config.method.name}_seed{config.seed}"
    try:
        run = fit(config, folder)
    except Interrupted:
        command = shlex.join(["saltflat", "train", "--resume", str(folder)])
        if started() == 1:
            print(f"stopped and saved; go on with: {command}")
            sys.exit(130)
        if is_first():
            print("stopped and saved; the same command goes on")
        return  # with success, or torchrun would start it again
    if not is_first():
        return
    teacher = "" if run.teacher_accuracy is None else f", teacher {run.teacher_accuracy:.2f} %"
    print(
        f"{folder}: {run.accuracy:.2f} % after the last epoch{teacher} "
        f"(best epoch {run.best_accuracy:.2f} %), {run.images_per_second:,.0f} images/s"
    )
    if run.diverged:
        print("the loss is not a number: the run diverged; try a smaller optimizer.lr")


def compare(options: Namespace) -> None:
    from saltflat.train import Interrupted
    from saltflat.train.compare import compare, describe, table, verdicts
    from saltflat.train.provenance import command

    config, own = _split(options, CompareOptions)
    methods = _chosen(config, own)
    print(f"comparing {', '.join(own.methods)} on {describe(config)}, {own.seeds} seeds")
    try:
        rows = compare(
            *(config, methods, own.out),
            seeds=own.seeds,
            jobs=own.jobs,
            budget=own.budget,
            command=command("saltflat", *options.arguments),
        )
    except (Interrupted, KeyboardInterrupt):
        print("stopped and saved; the same command goes on where it stopped")
        sys.exit(130)
    _show(table(rows))
    for sentence in verdicts(rows):
        print(sentence)
    print(f"95 % intervals by Student's t over {own.seeds} seeds; written to {own.out}")
    page = Path(own.out) / "report.html"
    try:
        _write_page([own.out], page, ["saltflat", "report", own.out, "-o", str(page)])
    except ImportError as error:
        print(f"no page to look at: {error}")


def report(options: Namespace) -> None:
    if options.paper and options.figures is None:
        raise ValueError("--paper makes files: say with --figures DIR where they go")
    settings = _write_page(options.runs, Path(options.out), ["saltflat", *options.arguments])
    if options.figures is None:
        return
    from saltflat.report.paper import write_paper
    from saltflat.report.pictures import write_figures

    folder = Path(options.figures)
    missing = write_paper(settings, folder) if options.paper else []
    write_figures(settings, folder)
    for sentence in missing:
        print(sentence)
    print(f"figures: {folder}")


def _write_page(runs: list[str], page: Path, command: list[str]) -> list[Any]:
    from saltflat.report.page import write_page
    from saltflat.report.records import read_settings

    settings = read_settings(runs)
    write_page(settings, page, shlex.join(command))
    print(f"page: {page}")
    return settings


def sharpness(options: Namespace) -> None:
    from saltflat.train.measure import chosen, describe, measure, table, write
    from saltflat.train.provenance import command, provenance

    values = options.as_dict()
    own = SharpnessOptions(**{f.name: values[f.name] for f in fields(SharpnessOptions)})
    measures = chosen(own.measures, own.rho, own.settings)
    if own.out is not None:  # fail before the work
        if Path(own.out).is_dir():
            raise ValueError(f"{own.out} is a folder: name a file, as {own.out}/sharpness.json")
        Path(own.out).parent.mkdir(parents=True, exist_ok=True)
    with Console(stderr=True).status("") as status:  # which shows on a terminal alone
        rows = measure(
            options.runs,
            measures,
            images=own.images,
            seed=own.seed,
            batchnorm=own.batchnorm,
            precision=own.precision,
            teacher=own.teacher,
            device=own.device,
            say=status.update,
        )
    _show(table(rows))
    what = "the moving average of the weights" if own.teacher else "the model"
    print(
        f"cross-entropy of {what} on up to {own.images:,} training images of each run, seed "
        f"{own.seed}; BatchNorm: {own.batchnorm}; {own.precision}"
    )
    print(f"{describe(measures)}; in brackets 95 % intervals over random draws")
    if own.out is not None:
        facts = provenance(command("saltflat", *options.arguments), rows[0].device)
        settings = {"seed": own.seed, "precision": own.precision, "teacher": own.teacher}
        write(Path(own.out), {**facts, **settings, "measures": measures}, rows)


def bench(options: Namespace) -> None:
    from saltflat.train.bench import bench, describe, heading, table, write
    from saltflat.train.provenance import command, provenance
    from saltflat.train.ranks import device_of

    config, own = _split(options, BenchOptions)
    configs = {method.name: replace(config, method=method) for method in _chosen(config, own)}
    accuracies = own.accuracies or {}
    _require_chosen("accuracies", accuracies, own)
    if accuracies and own.out is None:
        raise ValueError("accuracies are for a picture: say with --out where it goes")
    if accuracies:  # now, so that what is missing is missed before the work
        from saltflat.report.figures import accuracy_speed
    facts = {
        "work": describe(config),
        **provenance(command("saltflat", *options.arguments), device_of(config)),
        "rounds": own.rounds,
        "steps": own.steps,
        "accuracies": accuracies,
    }
    print(heading(facts))
    if own.out is not None:
        Path(own.out).mkdir(parents=True, exist_ok=True)  # or fail before the work
    rows = bench(configs, rounds=own.rounds, steps=own.steps)
    _show(table(rows))
    if own.out is not None:
        write(Path(own.out), facts, rows)
    if accuracies:
        known = [asdict(row) for row in rows if row.method in accuracies]
        points = [{**row, "accuracy": accuracies[row["method"]]} for row in known]
        accuracy_speed(points, Path(own.out) / "accuracy_speed")


def methods(_: Namespace) -> None:
    from saltflat.train.methods import METHODS

    lines = [["method", "passes", "settings", "what it does", "citation"]]
    for name, method in METHODS.items():
        settings = ", ".join(f"{k}={v}" for k, v in method.settings().items())
        lines.append([name, method.passes, settings, method.summary, method.citation])
    _show(lines)


def models(_: Namespace) -> None:
    from saltflat.train.models import MODELS

    _show([["model", "what it is"], *([name, text] for name, text in MODELS.items())])
    print("and every model of timm's, by its name there")


def recipes(_: Namespace) -> None:
    folder = Path("recipes")
    if not folder.is_dir():
        raise ValueError("no folder recipes here: run this in a clone of the repository")
    lines = [["recipe", "the paper's accuracy"]]
    for path in sorted(folder.glob("*.yaml")):
        found = re.match(r"# paper: (.*)", path.read_text())
        lines.append([str(path), found[1] if found else ""])
    _show(lines)


def _show(lines: list[list[str]]) -> None:
    header, *body = lines
    out = Table(*header)
    for line in body:
        out.add_row(*line)
    width = None if sys.stdout.isatty() else 160
    Console(width=width).print(out)
