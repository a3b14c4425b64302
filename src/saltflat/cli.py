"""The command line: parsing only."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

try:
    from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
    from rich.console import Console
    from rich.table import Table
except ImportError as error:  # the library itself needs torch and numpy alone
    raise ImportError("the command line needs: pip install 'saltflat[train]'") from error

EXAMPLES = {
    "train": "saltflat train --method.name saf --data.label_noise 0.2 --out runs/saf",
    "compare": "saltflat compare --config recipes/digits_noisy.yaml --methods [base,saf,mesa]",
    "bench": "saltflat bench --data.name synthetic:32:100 --model cifar_resnet18",
    "methods": "saltflat methods",
    "models": "saltflat models",
    "recipes": "saltflat recipes",
}


@dataclass(frozen=True)
class TrainOptions:
    """Where a run goes."""

    out: str | None = None
    """The run's folder; runs/<data>_<method>_seed<seed> unless said."""
    resume: str | None = None
    """A run's folder to go on with; its own config is used."""


@dataclass(frozen=True)
class MethodsOptions:
    """Which methods, and with which settings."""

    methods: tuple[str, ...] = ("base", "sam", "saf", "mesa")
    """The first is the base that the others are compared with."""
    settings: dict[str, dict[str, Any]] | None = None
    """What differs from a method's defaults, by its name: {saf: {weight: 0.5}}."""


@dataclass(frozen=True)
class CompareOptions(MethodsOptions):
    """What is compared, and how often."""

    seeds: int = 3
    jobs: int = 1
    """Runs at once."""
    budget: Literal["epochs", "time"] = "epochs"
    """time: a slower method trains for fewer epochs."""
    out: str = "runs/compare"


@dataclass(frozen=True)
class BenchOptions(MethodsOptions):
    """What is measured, and how often."""

    rounds: int = 7
    """Each takes every method in turn; one more comes first, to warm up."""
    steps: int = 10
    """Of a method in a round: a multiple of five for looksam, which climbs every fifth step."""
    accuracies: dict[str, float] | None = None
    """Of methods, in percent, for a picture of accuracy against speed: {base: 76.0, saf: 77.8}."""
    out: str | None = None
    """A folder for bench.json, bench.md and the picture."""
    plan: dict[str, float] | None = None
    """Instead, compute what SAF would send and keep on many processes: {samples: 14200000, classes:
    21843, processes: 64, per_machine: 8, batch: 128, step_ms: 100, parameters: 25557032}."""


class _Parser(ArgumentParser):
    """One line and exit code 2 for a bad option, with the nearest known one."""

    options: ClassVar[set[str]] = set()
    """Of all the commands."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        from saltflat.train.config import nearest

        known = {option for option in self.options if option.startswith("--")}
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        text = " ".join(lines)
        if found := re.search(r"[Uu]nrecognized arguments: (--[\w.]+)", text):
            text = f"unknown option {found[1]}: {nearest(found[1], known).split(' Known:')[0]}"
        keys = {name.removeprefix("--") for name in known}
        found = re.search(r"(?:does not accept option|[Kk]ey) ['\"]([\w.]+)['\"]", text)
        if found and found[1] not in keys:
            text = f"unknown key {found[1]}: {nearest(found[1], keys).split(' Known:')[0]}"
        _fail(text)


def _fail(message: object) -> NoReturn:
    print(f"saltflat: {message}", file=sys.stderr)
    sys.exit(2)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; bad input is an error of a line or two and exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    try:
        arguments = [a for a in arguments if a != "--debug"]
        parsed = _parser().parse_args(arguments)
        options = parsed[parsed.command]
        options.arguments = arguments  # as they were given, for the record of a measurement
        _COMMANDS[parsed.command](options)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        if debug:
            raise
        _fail(error)


def _parser() -> _Parser:
    from saltflat.train import Config

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _Parser(
        prog="saltflat",
        allow_abbrev=False,
        description="Sharpness-aware training for free. --debug shows the traceback of an error.",
    )
    commands = parser.add_subcommands(dest="command")
    for name, (description, options) in {
        "train": ("Train a model, or go on with a run.", TrainOptions),
        "compare": ("Train with several methods and compare them.", CompareOptions),
        "bench": ("Measure what a training step costs with several methods.", BenchOptions),
        "methods": ("List the methods.", None),
        "models": ("List the models.", None),
        "recipes": ("List the recipes and the paper's figures.", None),
    }.items():
        command = _Parser(
            allow_abbrev=False, description=f"{description} Example: {EXAMPLES[name]}"
        )
        if options is not None:
            command.add_argument("--config", action="config", help="A YAML file of options.")
            command.add_class_arguments(Config)
            command.add_class_arguments(options)
            _Parser.options.update(s for a in command._actions for s in a.option_strings)
        commands.add_subcommand(name, command, help=description)
    return parser


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


def _train(options: Namespace) -> None:
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


def _compare(options: Namespace) -> None:
    from saltflat.train import Interrupted
    from saltflat.train.compare import compare, describe, table, verdicts

    config, own = _split(options, CompareOptions)
    methods = _chosen(config, own)
    print(f"comparing {', '.join(own.methods)} on {describe(config)}, {own.seeds} seeds")
    try:
        rows = compare(config, methods, own.out, seeds=own.seeds, jobs=own.jobs, budget=own.budget)
    except (Interrupted, KeyboardInterrupt):
        print("stopped and saved; the same command goes on where it stopped")
        sys.exit(130)
    _print(table(rows))
    for sentence in verdicts(rows):
        print(sentence)
    print(f"95 % intervals by Student's t over {own.seeds} seeds; written to {own.out}")


def _bench(options: Namespace) -> None:
    from saltflat.train.bench import bench, describe, heading, table, write
    from saltflat.train.provenance import command, provenance
    from saltflat.train.ranks import device_of

    config, own = _split(options, BenchOptions)
    if own.plan is not None:
        _plan(own.plan)
        return
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
    _print(table(rows))
    if own.out is not None:
        write(Path(own.out), facts, rows)
    if accuracies:
        known = [asdict(row) for row in rows if row.method in accuracies]
        points = [{**row, "accuracy": accuracies[row["method"]]} for row in known]
        accuracy_speed(points, Path(own.out) / "accuracy_speed")


def _plan(numbers: dict[str, float]) -> None:
    from saltflat.train.plan import advice, plan_of, table

    plan = plan_of(numbers)
    print(", ".join(f"{name} {value:,}" for name, value in asdict(plan).items()))
    _print(table(plan))
    print(f"{advice(plan)}. Computed, not measured: see docs/guides/distributed.md")


def _methods(_: Namespace) -> None:
    from saltflat.train.methods import METHODS

    lines = [["method", "passes", "settings", "what it does", "citation"]]
    for name, method in METHODS.items():
        settings = ", ".join(f"{k}={v}" for k, v in method.settings().items())
        lines.append([name, method.passes, settings, method.summary, method.citation])
    _print(lines)


def _models(_: Namespace) -> None:
    from saltflat.train.models import MODELS

    _print([["model", "what it is"], *([name, text] for name, text in MODELS.items())])
    print("and every model of timm's, by its name there")


def _recipes(_: Namespace) -> None:
    folder = Path("recipes")
    if not folder.is_dir():
        raise ValueError("no folder recipes here: run this in a clone of the repository")
    lines = [["recipe", "the paper's accuracy"]]
    for path in sorted(folder.glob("*.yaml")):
        found = re.match(r"# paper: (.*)", path.read_text())
        lines.append([str(path), found[1] if found else ""])
    _print(lines)


def _print(lines: list[list[str]]) -> None:
    header, *body = lines
    out = Table(*header)
    for line in body:
        out.add_row(*line)
    width = None if sys.stdout.isatty() else 160
    Console(width=width).print(out)


_COMMANDS = {
    "train": _train,
    "compare": _compare,
    "bench": _bench,
    "methods": _methods,
    "models": _models,
    "recipes": _recipes,
}
