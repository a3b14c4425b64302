"""The comparison as cells that a page lays out: what is shown, and the number behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saltflat.report.records import Method, Setting, flatten


@dataclass(frozen=True)
class Cell:
    """A number and how it is shown."""

    value: float | None
    text: str
    detail: str = ""
    """Shown smaller, as an interval is."""


@dataclass(frozen=True)
class Column:
    """A quantity that is known of one method at least."""

    name: str
    title: str
    note: str
    cells: tuple[Cell, ...]


def columns(setting: Setting) -> list[Column]:
    """The table of a setting; columns that no method fills are left out."""
    spread = "95 % interval" if setting.compared else "lowest to highest seed"
    found = [
        ("accuracy", "accuracy, %", f"last epoch; {spread}", _interval("accuracy")),
        (
            "difference",
            "difference",
            "points, paired by seed; 95 %",
            _interval("difference"),
        ),
        ("best", "best epoch, %", "chosen on the test set", _number("best", "{:.2f}")),
        ("teacher", "teacher, %", "the moving average", _number("teacher", "{:.2f}")),
        ("images_per_second", "images/s", "", _number("images_per_second", "{:,.0f}")),
        ("speed", "speed", "share of the first's", _number("speed", "{:.0%}")),
        ("extra_bytes", "kept, MiB", "between steps", _mebibytes),
        ("sharpness", "sharpness", "rho 0.05, at the end", _number("sharpness", "{:.4f}")),
        ("epochs", "epochs", "", _number("epochs", "{:d}")),
        ("n", "seeds", "", _seeds),
    ]
    made = [
        Column(name, title, note, tuple(cell(method.row) for method in setting.methods))
        for name, title, note, cell in found
    ]
    return [column for column in made if any(cell.value is not None for cell in column.cells)]


def _interval(key: str) -> Any:
    def cell(row: Mapping[str, Any]) -> Cell:
        found = row[key]
        if found is None:
            return Cell(None, "")
        sign = "+" if key == "difference" else ""
        known = found["n"] > 1 and None not in (found["low"], found["high"])
        ends = f"{found['low']:.2f} to {found['high']:.2f}" if known else ""
        return Cell(found["mean"], f"{found['mean']:{sign}.2f}", ends)

    return cell


def _number(key: str, form: str) -> Any:
    def cell(row: Mapping[str, Any]) -> Cell:
        value = row.get(key)
        return Cell(None, "") if value is None else Cell(value, form.format(value))

    return cell


def _mebibytes(row: Mapping[str, Any]) -> Cell:
    value = row["extra_bytes"]
    return Cell(None, "") if value is None else Cell(value, f"{value / 2**20:.2f}")


def _seeds(row: Mapping[str, Any]) -> Cell:
    return Cell(row["accuracy"]["n"], str(row["accuracy"]["n"]))


def finding(method: Method) -> str:
    """In a word, what the interval of the difference says."""
    difference = method.row["difference"]
    if difference is None or difference["low"] is None:
        return ""
    if difference["low"] > 0:
        return "better"
    return "worse" if difference["high"] < 0 else "no evidence"


@dataclass(frozen=True)
class Option:
    """An option of the configs: one value for all, or one for each."""

    name: str
    values: tuple[str, ...]
    differs: bool


def options(settings: list[Setting]) -> list[Option]:
    """Every option of every config, those that differ first; a seed is no difference."""
    configs = [flatten(m.runs[0].config) for setting in settings for m in setting.methods]
    found = []
    for name in dict.fromkeys(key for config in configs for key in config):
        if name == "seed":
            continue
        values = [_shown(config[name]) if name in config else "default" for config in configs]
        differs = len(set(values)) > 1
        found.append(Option(name, tuple(values if differs else values[:1]), differs))
    return sorted(found, key=lambda option: not option.differs)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
