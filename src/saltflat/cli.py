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
    raise ImportError(
        "the command line needs: pip install 'saltflat[train]', or '.[train]' in a checkout"
    ) from error

EXAMPLES = {
    "train": "saltflat train --method.name saf --data.label_noise 0.2 --out runs/saf",
    "compare": "saltflat compare --config recipes/digits_noisy.yaml --methods [base,saf,mesa]",
    "sharpness": "saltflat sharpness runs/saf runs/base --measures [sam,eigenvalues]",
    "bench": "saltflat bench --data.name synthetic:32:100 --model cifar_resnet18",
    "landscape": "saltflat landscape runs/base runs/saf --figures pictures",
    "report": "saltflat report runs/compare -o report.html --figures figures",
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


@dataclass(frozen=True)
class SharpnessOptions:
    """What is measured, and on what."""

    measures: tuple[str, ...] = ("sam", "adaptive", "eigenvalues", "trace")
    """Of sam, max, m, adaptive, average, eigenvalues, trace, spectrum: docs/guides/sharpness.md."""
    rho: float | None = None
    """Of every measure that has one; each has its own unless said."""
    settings: dict[str, dict[str, Any]] | None = None
    """What else differs from a measure's defaults, by its name: {max: {steps: 50}}."""
    images: int = 1024
    """Training images, without augmentation; all where a run has fewer."""
    seed: int = 0
    """Which images, and which random vectors: the same for every run."""
    batchnorm: Literal["eval", "recalibrated", "batch"] = "eval"
    """What BatchNorm normalises with: running statistics, those of the images at the weights where
    the loss is taken, or those of each batch."""
    precision: Literal["float32", "float64"] = "float32"
    teacher: bool = False
    """Measure the moving average that mesa and ema keep, instead of the model."""
    device: str | None = None
    """Instead of the one that a run was trained on."""
    out: str | None = None
    """A file for everything as JSON; a spectrum is only there."""


@dataclass(frozen=True)
class LandscapeOptions:
    """What of the loss is shown."""

    mode: Literal["plane", "line", "between", "trajectory"] = "plane"
    """plane or line: along random directions, the same for every run; between: the line from the
    first of two runs to the second; trajectory: the plane of a run's snapshots."""
    points: int = 100
    """Along an axis."""
    span: float = 1.0
    """How far: 1 is each filter's own length, or from run to run, or around the trajectory."""
    seed: int = 0
    """Of the random directions."""
    images: int = 1000
    """Of the training set, without augmentation."""
    batchnorm: Literal["eval", "batch"] | None = None
    """Statistics: eval, the model's own; batch, those of every 256 images. Unless said, eval, and
    batch for a trajectory."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """auto: bf16 on a GPU that has it, if the losses agree."""
    device: str | None = None
    """Unless said, where the run was trained."""
    out: str | None = None
    """A file for one surface, instead of landscape.npz in the run's folder."""
    figures: str | None = None
    """A folder for pictures of all, on one scale, as PNG and SVG."""


class _Parser(ArgumentParser):
    """One line and exit code 2 for a bad option, with the nearest known one."""

    options: ClassVar[dict[str, set[str]]] = {}
    """Of each command."""
    command: ClassVar[str] = ""
    """The one that is parsed."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        from saltflat.train.config import nearest

        options = self.options.get(self.command, set())
        known = {option for option in options if option.startswith("--")}
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
        arguments = [_with_underscores(a) for a in arguments if a != "--debug"]
        _Parser.command = next((a for a in arguments if not a.startswith("-")), "")
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


def _with_underscores(argument: str) -> str:
    """--track-sharpness=5 is --track_sharpness=5, as it is spelled in YAML."""
    name, equals, value = argument.partition("=")
    return re.sub(r"(?<=\w)-", "_", name) + equals + value if name[:2] == "--" else argument


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
        "sharpness": ("Measure how flat the minima of recorded runs are.", SharpnessOptions),
        "bench": ("Measure what a training step costs with several methods.", BenchOptions),
        "landscape": ("Show the loss around the weights of runs.", LandscapeOptions),
        "report": ("Make one page of recorded runs.", None),
        "methods": ("List the methods.", None),
        "models": ("List the models.", None),
        "recipes": ("List the recipes and the paper's figures.", None),
    }.items():
        command = _Parser(
            allow_abbrev=False, description=f"{description} Example: {EXAMPLES[name]}"
        )
        if options is not None:
            command.add_argument("--config", action="config", help="A YAML file of options.")
            if options in (SharpnessOptions, LandscapeOptions):
                command.add_argument("runs", nargs="*", help="Folders of recorded runs.")
            else:
                command.add_class_arguments(Config)
            command.add_class_arguments(options)
            _Parser.options[name] = {s for a in command._actions for s in a.option_strings}
        if name == "report":
            _add_report(command)
        commands.add_subcommand(name, command, help=description)
    return parser


def _add_report(command: _Parser) -> None:
    add = command.add_argument
    add("runs", nargs="*", type=str, help="Folders of runs, or of comparisons.")
    add("-o", "--out", type=str, default="report.html", help="The page.")
    add("--figures", type=str | None, help="A folder for every figure as .svg, .pdf and .png.")
    add("--paper", action="store_true", help="With --figures: the paper's figures too.")


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
    _print(table(rows))
    for sentence in verdicts(rows):
        print(sentence)
    print(f"95 % intervals by Student's t over {own.seeds} seeds; written to {own.out}")
    page = Path(own.out) / "report.html"
    try:
        _write_page([own.out], page, ["saltflat", "report", own.out, "-o", str(page)])
    except ImportError as error:
        print(f"no page to look at: {error}")


def _report(options: Namespace) -> None:
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


def _sharpness(options: Namespace) -> None:
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
    _print(table(rows))
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


def _landscape(options: Namespace) -> None:
    from torch.nn.functional import cross_entropy

    from saltflat.landscape import loss_surface
    from saltflat.landscape._progress import TimeLeft
    from saltflat.train.provenance import command, provenance
    from saltflat.train.runs import open_run

    own = LandscapeOptions(**{f.name: options[f.name] for f in fields(LandscapeOptions)})
    if own.figures is not None:  # now, so that what is missing is missed before the work
        from saltflat.landscape.plot import draw
    runs = [open_run(folder, device=own.device) for folder in options.runs]
    if own.mode == "between" and (len(runs) != 2 or runs[0].config.model != runs[1].config.model):
        found = ", ".join(f"{run.folder} of {run.config.model}" for run in runs)
        raise ValueError(f"between is for two runs of one model, got {found}")
    shown = runs[:1] if own.mode == "between" else runs
    if own.out is not None and len(shown) > 1:
        raise ValueError(f"--out is for one surface, and there are {len(shown)}: leave it out")
    batchnorm = own.batchnorm or ("batch" if own.mode == "trajectory" else "eval")
    surfaces = {}
    for run in shown:
        ends = runs if own.mode == "between" else [run]
        title = " to ".join(f"{one.config.method.name}, seed {one.config.seed}" for one in ends)
        title = f"{title} ({run.folder})" if title in surfaces else title
        path = Path(own.out) if own.out else run.folder / _surface_name(own.mode, runs)
        facts = {
            "title": title,
            "model": run.config.model,
            "epochs": run.epochs,
            **provenance(command("saltflat", *options.arguments), run.device),
        }
        try:
            surfaces[title] = surface = loss_surface(
                run.model,
                cross_entropy,
                run.batches(own.images),
                points=own.points,
                span=own.span,
                directions=_directions(own, runs, run),
                batchnorm=batchnorm,
                precision=own.precision,
                path=path,
                facts=facts,
                progress=TimeLeft(title),
            )
        except KeyboardInterrupt:
            print("stopped and saved; the same command goes on where it stopped")
            raise
        about = surface.provenance
        print(
            f"{path}: loss {about['origin_loss']:.4g} at the weights, {surface.losses.min():.4g} "
            f"to {surface.losses.max():.4g} around; {about['seconds']:.1f} s, {about['how']}"
        )
    if own.figures is not None:
        for picture in draw(surfaces, Path(own.figures), f"landscape_{own.mode}"):
            print(picture)


def _surface_name(mode: str, runs: list[Any]) -> str:
    """The file of a surface in a run's folder; the report reads that of a plane."""
    if mode == "between":
        return f"landscape_to_{runs[1].config.method.name}_seed{runs[1].config.seed}.npz"
    return "landscape.npz" if mode == "plane" else f"landscape_{mode}.npz"


def _directions(own: LandscapeOptions, runs: list[Any], run: Any) -> Any:
    from saltflat.landscape import line_between, random_directions, trajectory_plane
    from saltflat.train.checkpoint import load_snapshots

    if own.mode == "between":
        return line_between(*(one.model for one in runs))
    if own.mode == "trajectory":
        kept = load_snapshots(run.folder)
        try:
            return trajectory_plane(run.model, [kept[at] for at in kept if at < run.epochs])
        except ValueError as error:
            raise ValueError(f"{run.folder}: {error}") from error
    return random_directions(run.model, seed=own.seed, count=2 if own.mode == "plane" else 1)


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
    "sharpness": _sharpness,
    "bench": _bench,
    "landscape": _landscape,
    "report": _report,
    "methods": _methods,
    "models": _models,
    "recipes": _recipes,
}
