"""Recorded runs measured: a row for each, on the same images, with one policy for BatchNorm."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.nn.functional import cross_entropy

from saltflat import sharpness
from saltflat.sharpness.neighbourhood import one_step
from saltflat.train.config import nearest, require
from saltflat.train.files import to_json, write_text
from saltflat.train.methods import check_kind
from saltflat.train.runs import Opened, check_run, open_run

MEASURES: Mapping[str, Callable[..., sharpness.Measured]] = MappingProxyType(
    {
        "sam": one_step,
        "max": sharpness.max_sharpness,
        "m": sharpness.m_sharpness,
        "adaptive": sharpness.adaptive_sharpness,
        "average": sharpness.average_sharpness,
        "eigenvalues": sharpness.top_eigenvalues,
        "trace": sharpness.hessian_trace,
        "spectrum": sharpness.spectral_density,
    }
)
"""By the names that they have on the command line."""
_GIVEN = {"model", "loss_fn", "batches", "seed", "batchnorm"}


@dataclass(frozen=True)
class Row:
    """What was measured of a run."""

    run: Path
    method: str
    epochs: int
    """Done when its checkpoint was written."""
    device: torch.device
    results: dict[str, sharpness.Measured]
    """By measure."""


def chosen(
    measures: Sequence[str],
    rho: float | None = None,
    settings: Mapping[str, dict[str, Any]] | None = None,
) -> dict[str, dict[str, Any]]:
    """All the settings of some measures, their defaults included.

    Args:
        measures: Names of `MEASURES`.
        rho: Of every measure that has one; its own default unless said.
        settings: What else differs from a measure's defaults, by its name.

    Raises:
        ValueError: If there is no such measure or setting, or rho is negative.
    """
    require(bool(measures), f"there is no measure to take. Known: {', '.join(MEASURES)}")
    require(rho is None or rho >= 0, f"rho must be 0 or more, got {rho}")
    full = {}
    for name in measures:
        require(name in MEASURES, f"unknown measure {name!r}: {nearest(name, MEASURES)}")
        parameters = inspect.signature(MEASURES[name]).parameters.values()
        full[name] = {p.name: p.default for p in parameters if p.name not in _GIVEN}
        if rho is not None and "rho" in full[name]:
            full[name]["rho"] = rho
    for name, own in (settings or {}).items():
        require(name in full, f"settings for {name}, not among the measures")
        for key, value in own.items():
            require(key in full[name], f"{name} has no setting {key!r}: {nearest(key, full[name])}")
            check_kind(name, key, value, full[name][key])
            full[name][key] = value
    return full


def measure(
    runs: Sequence[Path | str],
    measures: Mapping[str, dict[str, Any]],
    *,
    images: int = 1024,
    seed: int = 0,
    batchnorm: sharpness.Policy = "eval",
    precision: Literal["float32", "float64"] = "float32",
    teacher: bool = False,
    device: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Take some measures of some runs: of the cross-entropy of their training images, as a test
    would see them.

    Args:
        runs: Folders of recorded runs.
        measures: As `chosen` gives them.
        images: How many of a run's training images; all where there are fewer.
        seed: Which images, and which random vectors.
        batchnorm: What BatchNorm normalises with.
        precision: Of weights, images and all that is computed.
        teacher: Measure the moving average of the weights instead.
        device: Instead of the one that a run was trained on.
        say: Told what is being done.

    Raises:
        ValueError: If a run cannot be opened or measured; of what a look at the folders shows,
            before anything is measured.
    """
    require(bool(runs), "there is no run to measure: name folders that saltflat train has written")
    for run in runs:
        check_run(Path(run))
    rows = []
    for run in runs:
        say(f"opening {run}")
        opened = open_run(run, device=device)
        given = {
            "model": _model(opened, teacher).to(getattr(torch, precision)),
            "loss_fn": cross_entropy,
            "batches": [
                (x.to(getattr(torch, precision)), y) for x, y in opened.batches(images, seed=seed)
            ],
            "batchnorm": batchnorm,
        }
        results = {}
        for name, settings in measures.items():
            say(f"{run}: {name}")
            function = MEASURES[name]
            seeded = {"seed": seed} if "seed" in inspect.signature(function).parameters else {}
            try:
                results[name] = function(**given, **seeded, **settings)
            except ValueError as error:
                raise ValueError(f"{run}: {name}: {error}") from error
        method = opened.config.method.name
        rows.append(Row(opened.folder, method, opened.epochs, opened.device, results))
    return rows


def _model(opened: Opened, teacher: bool) -> torch.nn.Module:
    if not teacher:
        return opened.model
    if opened.teacher is None:
        raise ValueError(
            f"{opened.folder} keeps no moving average of its weights, being trained with "
            f"{opened.config.method.name}: measure the model"
        )
    return opened.teacher


def table(rows: list[Row]) -> list[list[str]]:
    """The header and a line for each run."""
    names = list(rows[0].results)
    lines = [["run", "method", "epochs", "images", *names]]
    for row in rows:
        images = max(result.images for result in row.results.values())  # m leaves some out
        cells = [_cell(result) for result in row.results.values()]
        lines.append([str(row.run), row.method, str(row.epochs), f"{images:,}", *cells])
    return lines


def _cell(result: Any) -> str:
    if isinstance(result, sharpness.Eigenvalues):
        values = ", ".join(f"{value:.4g}" for value in result.values)
        worst = max(result.residuals)
        return values if result.converged else f"{values} (not converged, within {worst:.2g})"
    if isinstance(result, sharpness.Spectrum):
        nodes = [node for draw in result.nodes for node in draw]
        return f"{min(nodes):.4g} to {max(nodes):.4g}"
    return format(result.value if result.interval is None else result.interval, ".4g")


def describe(measures: Mapping[str, dict[str, Any]]) -> str:
    """The measures and their settings, in a line."""
    said = {
        name: ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)
        for name, settings in measures.items()
    }
    return "; ".join(f"{name}: {settings}" for name, settings in said.items())


def write(path: Path, facts: dict[str, Any], rows: list[Row]) -> None:
    """Everything as JSON, spectra included."""
    records = [{**dataclasses.asdict(row), "device": str(row.device)} for row in rows]
    write_text(path, to_json({**facts, "rows": records}, indent=1) + "\n")
