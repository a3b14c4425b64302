"""The command line: what there is to say, and one line for what cannot be."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

try:
    from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

    from saltflat.cli import commands
    from saltflat.cli.landscapes import landscape
except ImportError as error:  # the library itself needs torch and numpy alone
    raise ImportError(
        "the command line needs: pip install 'saltflat[train]', or '.[train]' in a checkout"
    ) from error

from saltflat.cli.options import (
    BenchOptions,
    CompareOptions,
    LandscapeOptions,
    SharpnessOptions,
    TrainOptions,
)


@dataclass(frozen=True)
class Command:
    """A word after `saltflat`."""

    run: Callable[[Namespace], None]
    does: str
    example: str
    options: type[Any] | None = None
    """Its own, beside a config's."""
    on_runs: bool = False
    """Whether it takes recorded runs instead of a config."""


COMMANDS = {
    "train": Command(
        commands.train,
        "Train a model, or go on with a run.",
        "saltflat train --method.name saf --data.label_noise 0.2 --out runs/saf",
        TrainOptions,
    ),
    "compare": Command(
        commands.compare,
        "Train with several methods and compare them.",
        "saltflat compare --config recipes/digits_noisy.yaml --methods [base,saf,mesa]",
        CompareOptions,
    ),
    "sharpness": Command(
        commands.sharpness,
        "Measure how flat the minima of recorded runs are.",
        "saltflat sharpness runs/saf runs/base --measures [sam,eigenvalues]",
        SharpnessOptions,
        on_runs=True,
    ),
    "bench": Command(
        commands.bench,
        "Measure what a training step costs with several methods.",
        "saltflat bench --data.name synthetic:32:100 --model cifar_resnet18",
        BenchOptions,
    ),
    "landscape": Command(
        landscape,
        "Show the loss around the weights of runs.",
        "saltflat landscape runs/base runs/saf --figures pictures",
        LandscapeOptions,
        on_runs=True,
    ),
    "report": Command(
        commands.report,
        "Make one page of recorded runs.",
        "saltflat report runs/compare -o report.html --figures figures",
    ),
    "methods": Command(commands.methods, "List the methods.", "saltflat methods"),
    "models": Command(commands.models, "List the models.", "saltflat models"),
    "recipes": Command(
        commands.recipes, "List the recipes and the paper's figures.", "saltflat recipes"
    ),
}


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
        COMMANDS[parsed.command].run(options)
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
    words = parser.add_subcommands(dest="command")
    for name, command in COMMANDS.items():
        about = f"{command.does} Example: {command.example}"
        one = _Parser(allow_abbrev=False, description=about)
        if command.options is not None:
            one.add_argument("--config", action="config", help="A YAML file of options.")
            if command.on_runs:
                one.add_argument("runs", nargs="*", help="Folders of recorded runs.")
            else:
                one.add_class_arguments(Config)
            one.add_class_arguments(command.options)
            _Parser.options[name] = {s for a in one._actions for s in a.option_strings}
        if name == "report":
            _add_report(one)
        words.add_subcommand(name, one, help=command.does)
    return parser


def _add_report(command: _Parser) -> None:
    add = command.add_argument
    add("runs", nargs="*", type=str, help="Folders of runs, or of comparisons.")
    add("-o", "--out", type=str, default="report.html", help="The page.")
    add("--figures", type=str | None, help="A folder for every figure as .svg, .pdf and .png.")
    add("--paper", action="store_true", help="With --figures: the paper's figures too.")
