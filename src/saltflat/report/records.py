"""What runs left on disk, read once and checked: the only way by which a report knows of them.

A page is of one data set. It has a `Setting` for each model, or for each comparison: methods side
by side. A `Method` is a config and its seeds.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from string import ascii_uppercase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saltflat.landscape import Surface

_DATA = ("name", "train_size", "holdout", "image_size", "label_noise", "noise_seed")
"""What makes two data sets different ones; the rest is what is done to them."""
_NEEDED = ("model", "seed", "epochs", "method.name", "data.name", "data.label_noise")
"""Of a config, by a report."""
_ASIDE = frozenset(
    (
        *("device", "timeout", "data.root", "data.workers"),
        *("checkpoint_every", "evaluate_every", "track_sharpness", "snapshot_every", "log"),
    )
)
"""Where and how a run is made and recorded; the run itself is the same."""
_LONG = 24
"""What is said of a config beside its method, in letters: more is no label for a picture."""


@dataclass(frozen=True)
class Run:
    """A run, complete or on its way."""

    folder: Path
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any]
    """Empty until it is complete."""
    landscape: Surface | None
    """Around its weights, on a grid."""
    line: Surface | None
    """Likewise, along a line."""

    @property
    def method(self) -> str:
        return str(self.config["method"]["name"])

    @property
    def complete(self) -> bool:
        return bool(self.result)

    @property
    def accuracies(self) -> list[float]:
        """Of the epochs that were tested."""
        return [float(line["accuracy"]) for line in self.metrics if "accuracy" in line]

    @property
    def epochs(self) -> int:
        """How many are done; they need not all be in the metrics."""
        return int(self.metrics[-1]["epoch"]) + 1

    @property
    def command(self) -> str:
        """The one that makes it again, or goes on with it, here."""
        config = shlex.join(["saltflat", "train", "--config", str(self.folder / "config.json")])
        return f"{self.result.get('command') or config} --out {shlex.quote(str(self.folder))}"


@dataclass(frozen=True)
class Method:
    """The seeds of one config, and what the table says of them."""

    label: str
    runs: tuple[Run, ...]
    row: Mapping[str, Any]
    """As in summary.json; of runs that were not compared, the same figures as far as known."""
    detail: str = ""
    """What sets it apart from the others, where that is too long for the label."""

    @property
    def diverged(self) -> str:
        """In words, how many of its runs did."""
        count = sum(bool(run.result.get("diverged")) for run in self.runs)
        return "" if not count else f"{count} of {len(self.runs)} diverged"

    def curve(self, key: str) -> Curve:
        """A figure by epoch, over the seeds that have it."""
        found: dict[int, list[float]] = {}
        for run in self.runs:
            for line in run.metrics:
                if line.get(key) is not None:
                    found.setdefault(int(line["epoch"]), []).append(float(line[key]))
        epochs = sorted(found)
        return Curve(
            self.label,
            np.array(epochs, float),
            np.array([fmean(found[e]) for e in epochs]),
            np.array([min(found[e]) for e in epochs]),
            np.array([max(found[e]) for e in epochs]),
        )


@dataclass(frozen=True)
class Curve:
    """A method's line in a picture: the mean over its seeds, the lowest and the highest."""

    label: str
    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """Methods side by side: a comparison, or the runs of one model."""

    name: str
    methods: tuple[Method, ...]
    compared: bool
    """Whether `saltflat compare` summed it up: intervals and verdicts are its."""
    verdicts: tuple[str, ...]
    provenance: Mapping[str, Any]
    peak_bytes: Mapping[str, int]
    """By method, of a bench.json beside the comparison."""

    @property
    def runs(self) -> Iterator[Run]:
        return (run for method in self.methods for run in method.runs)

    @property
    def landscape_command(self) -> str:
        """The one for a landscape of each method."""
        return shlex.join(["saltflat", "landscape", *(str(m.runs[0].folder) for m in self.methods)])


def tracked(settings: Iterable[Setting]) -> bool:
    """Whether sharpness was measured by epoch, whatever it was."""
    return any(
        run.config.get("track_sharpness") or any("sharpness" in line for line in run.metrics)
        for setting in settings
        for run in setting.runs
    )


def read_settings(folders: Iterable[Path | str]) -> list[Setting]:
    """Read run folders and comparisons.

    Raises:
        ValueError: If there are none, one holds no records, or they are of different data.
    """
    paths = list({Path(folder).resolve(): Path(folder) for folder in folders}.values())
    if not paths:
        raise ValueError("a report needs runs: name folders of `saltflat train` or `compare`")
    compared = [path for path in paths if (path / "summary.json").exists()]
    loose: dict[str, list[Run]] = {}
    for path in paths:
        if path not in compared:
            run = read_run(path)
            loose.setdefault(run.config["model"], []).append(run)
    settings = [_comparison(path) for path in compared]
    settings += [_loose(model, runs) for model, runs in loose.items()]
    _require_one_data_set(settings)
    return _distinct_names(settings, compared)


def read_run(folder: Path) -> Run:
    """Read one run.

    Raises:
        ValueError: If the folder holds none, or one without an epoch.
    """
    if not (folder / "config.json").exists():
        below = sorted(p.parent for at in ("*", "*/*") for p in folder.glob(f"{at}/config.json"))
        hint = f"; there are runs below it: {' '.join(map(str, below[:4]))}" if below else ""
        raise ValueError(
            f"{folder} holds no records: neither config.json of a run nor summary.json of a "
            f"comparison{hint}"
        )
    path, result = folder / "metrics.jsonl", folder / "result.json"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith("\n") and not result.exists():
        del lines[-1]  # which is being written
    metrics = [_parsed(line, path) for line in lines]
    if not any("accuracy" in line for line in metrics):
        raise ValueError(f"{folder} has no tested epoch yet: wait for its first, or leave it out")
    return Run(
        folder,
        _config(folder / "config.json"),
        metrics,
        _json(result) if result.exists() else {},
        *(_surface(folder / f"{name}.npz") for name in ("landscape", "landscape_line")),
    )


def _comparison(folder: Path) -> Setting:
    summary = _json(folder / "summary.json")
    first = int(summary["config"]["seed"])
    methods = []
    for row in summary["rows"]:
        seeds = range(first, first + int(row["accuracy"]["n"]))
        runs = [read_run(folder / row["method"] / f"seed{seed}") for seed in seeds]
        methods.append(Method(row["method"], tuple(runs), row))
    bench = folder / "bench.json"
    measured = _json(bench)["rows"] if bench.exists() else []
    return Setting(
        name=summary["config"]["model"],
        methods=tuple(methods),
        compared=True,
        verdicts=tuple(summary["verdicts"]),
        provenance=summary.get("provenance", {}),
        peak_bytes={r["method"]: r["peak_bytes"] for r in measured if r["peak_bytes"] is not None},
    )


def _loose(model: str, runs: list[Run]) -> Setting:
    """Runs of one model that no comparison summed up, the seeds of a config together."""
    by_config: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps(_chosen(run), sort_keys=True)
        by_config.setdefault(key, []).append(run)
    groups = list(by_config.values())
    methods = []
    for group, (label, detail) in zip(groups, _labels(groups), strict=True):
        group.sort(key=lambda run: int(run.config["seed"]))
        for one, other in pairwise(group):
            if one.config["seed"] == other.config["seed"]:
                raise ValueError(
                    f"{one.folder} and {other.folder} are of one config and one seed, and would "
                    "count as two: leave one out"
                )
        methods.append(Method(label, tuple(group), _row(group), detail))
    return Setting(model, tuple(methods), False, (), runs[0].result, {})


def _chosen(run: Run) -> dict[str, Any]:
    """What makes a run another one than its seed does."""
    return {k: v for k, v in flatten(run.config).items() if k != "seed" and k not in _ASIDE}


def _labels(groups: list[list[Run]]) -> list[tuple[str, str]]:
    """The method's name with what sets a config apart from others of the same method.

    That is a letter where it would be too long; then the second part says it.
    """
    by_name: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        by_name.setdefault(group[0].method, []).append(_chosen(group[0]))
    labels = []
    for group in groups:
        name, one = group[0].method, _chosen(group[0])
        alike = by_name[name]
        keys = sorted({key for other in alike for key in other})
        own = [k for k in keys if len({json.dumps(other.get(k)) for other in alike}) > 1]
        details = [
            ", ".join(f"{k.rpartition('.')[2]} {other.get(k, 'default')}" for k in own)
            for other in alike
        ]
        place = alike.index(one)
        if max(map(len, details)) > _LONG:
            labels.append((f"{name} {_letter(place)}", details[place]))
        else:
            labels.append((f"{name} ({details[place]})" if own else name, ""))
    return labels


def _letter(place: int) -> str:
    return ascii_uppercase[place] if place < len(ascii_uppercase) else str(place + 1)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config as on the command line.

    Example:
        >>> flatten({"data": {"name": "digits"}, "epochs": 3})
        {'data.name': 'digits', 'epochs': 3}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _row(runs: list[Run]) -> dict[str, Any]:
    """What a comparison's row says, as far as runs alone can: lowest and highest, no interval."""
    accuracies = [run.accuracies[-1] for run in runs]

    def mean(key: str) -> float | None:
        values = [run.result[key] for run in runs if run.result.get(key) is not None]
        return fmean(values) if values else None

    return {
        "method": runs[0].method,
        "accuracy": {
            "mean": fmean(accuracies),
            "low": min(accuracies),
            "high": max(accuracies),
            "n": len(runs),
        },
        "best": fmean(run.result.get("best_accuracy") or max(run.accuracies) for run in runs),
        "teacher": mean("teacher_accuracy"),
        "difference": None,
        "images_per_second": mean("images_per_second"),
        "speed": None,
        "extra_bytes": mean("extra_bytes"),
        "sharpness": mean("sharpness"),
        "epochs": min(run.epochs for run in runs),
    }


def _require_one_data_set(settings: list[Setting]) -> None:
    found: dict[str, list[Path]] = {}
    for setting in settings:
        for run in setting.runs:
            key = ", ".join(f"{name} {run.config['data'].get(name) or 'none'}" for name in _DATA)
            found.setdefault(key, []).append(run.folder)
    if len(found) > 1:
        lists = "; ".join(f"{key}: {folders[0]}" for key, folders in found.items())
        raise ValueError(
            f"the runs are of different data, whose accuracies cannot stand in one table ({lists}):"
            " make a page for each"
        )


def _distinct_names(settings: list[Setting], compared: list[Path]) -> list[Setting]:
    """A model's name, with its folder where two settings have the same model."""
    names = [setting.name for setting in settings]
    if len(set(names)) == len(names):
        return settings
    homes = [*_tails([path.resolve() for path in compared]), *["single runs"] * len(settings)]
    return [
        replace(setting, name=f"{setting.name} ({home})")
        for setting, home in zip(settings, homes, strict=False)
    ]


def _tails(paths: list[Path]) -> list[str]:
    """As many of the last parts of different paths as it takes to tell them apart.

    Example:
        >>> _tails([Path("/a/c"), Path("/b/c")])
        ['a/c', 'b/c']
    """
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def _surface(path: Path) -> Surface | None:
    return Surface.load(path) if path.exists() else None


def _config(path: Path) -> dict[str, Any]:
    found = _json(path)
    flat = flatten(found) if isinstance(found, dict) else {}
    if missing := [key for key in _NEEDED if key not in flat]:
        raise ValueError(f"{path} is not a run's config, it lacks {', '.join(missing)}: remove it")
    return dict(found)


def _json(path: Path) -> Any:
    return _parsed(path.read_text(), path)


def _parsed(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}): remove it") from error
