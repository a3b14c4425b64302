"""Which pictures a report has: each drawn once, for the page and as files, with its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure, FigureBase

from saltflat.report.figures import (
    Indices,
    Point,
    draw_bars,
    draw_contours,
    draw_curves,
    draw_dots,
    draw_points,
    draw_surface,
    save,
)
from saltflat.report.records import Curve, Run, Setting
from saltflat.report.scale import Scale, common_scale, logarithmic
from saltflat.report.style import PAPER, Style

_MOST_POINTS = 400
"""Of a curve that is drawn; a longer one is thinned."""


@dataclass(frozen=True)
class Picture:
    """A figure, what it says in words, and the same as a table."""

    name: str
    title: str
    caption: str
    draw: Callable[[FigureBase, Style], None]
    lines: Sequence[Sequence[str]]
    """The numbers: the header first."""
    width: float = 1.0
    """As a share of the style's."""
    height: float = 0.64
    """As a share of the width."""
    by_epoch: bool = False
    """Whether the table's first column is the picture's horizontal axis."""


def render(picture: Picture, style: Style) -> Figure:
    """Draw a picture in a style."""
    with rc_context(style.settings(picture.name)):
        width = style.width * picture.width
        size = (width, width * picture.height)
        figure = Figure(figsize=size, layout="constrained")
        picture.draw(figure, style)
    return figure


def indices_of(settings: Sequence[Setting]) -> dict[str, int]:
    """A number for each method, the same in all settings."""
    labels = [method.label for setting in settings for method in setting.methods]
    return {label: i for i, label in enumerate(dict.fromkeys(labels))}


def accuracy_against_speed(settings: Sequence[Setting], indices: Indices) -> Picture | None:
    """The paper's figure 1; None where no speed is known."""
    lines: dict[str, list[Point]] = {}
    table = [["model", "method", "images/s", "accuracy, %"]]
    for setting in settings:
        for method in setting.methods:
            speed, accuracy = method.row["images_per_second"], method.row["accuracy"]
            if speed is None:
                continue
            mean = accuracy["mean"]
            low, high = (mean if accuracy[k] is None else accuracy[k] for k in ("low", "high"))
            lines.setdefault(method.label, []).append(Point(speed, mean, low, high))
            table.append([setting.name, method.label, f"{speed:,.0f}", f"{mean:.2f}"])
    if not lines:
        return None
    compared = all(setting.compared for setting in settings)
    bars = "95 % intervals" if compared else "the range of the seeds"
    joined = " A line joins the models of a method." if len(settings) > 1 else ""
    return Picture(
        "accuracy_speed",
        "Accuracy against speed",
        f"After the last epoch, with {bars}. Up and to the right is better.{joined}",
        lambda figure, style: draw_points(figure.subplots(), lines, indices, style),
        table,
    )


def pictures_of(setting: Setting, indices: Indices) -> list[Picture]:
    """A setting's curves and memory."""
    found = [
        _by_epoch(
            setting,
            indices,
            ("training_loss", "loss", "Training loss", "training loss"),
            "Cross-entropy of the training batches alone, without what a method adds to it.",
        ),
        _by_epoch(
            setting,
            indices,
            ("test_accuracy", "accuracy", "Test accuracy", "test accuracy, %"),
            "Of the model itself on the test set.",
        ),
        _every_seed(setting, indices),
        _sharpness(setting, indices),
        _memory(setting, indices),
        _lines(setting, indices),
    ]
    return [picture for picture in found if picture is not None]


def _by_epoch(
    setting: Setting, indices: Indices, words: tuple[str, str, str, str], caption: str
) -> Picture | None:
    name, key, title, ylabel = words
    curves = [curve for m in setting.methods if len((curve := m.curve(key)).x)]
    if not curves:
        return None
    log = key != "accuracy" and logarithmic(np.concatenate([curve.mean for curve in curves]))
    bottom = None
    if key == "accuracy" and (late := _late(curves)) is not None:
        bottom, lowest = late
        if lowest < bottom:
            caption += " The first epochs lie below."
    if any(len(method.runs) > 1 for method in setting.methods):
        caption += " Mean over the seeds; the shade is their range."
    thin = [thinned(curve) for curve in curves]
    return Picture(
        _named(name, setting),
        title,
        caption,
        lambda figure, style: draw_curves(
            figure.subplots(), thin, indices, style, ylabel=ylabel, log=log, bottom=bottom
        ),
        _table("epoch", thin),
        by_epoch=True,
    )


def _late(curves: Sequence[Curve]) -> tuple[float, float] | None:
    """The lowest value after the first tenth of the epochs, a little lower, and the lowest of all.

    Where accuracy starts is the same for all; where it ends is what the picture is for.
    """
    last = max(curve.x[-1] for curve in curves)
    late = [curve.mean[curve.x >= last / 10] for curve in curves]
    if last < 5:
        return None
    values = np.concatenate(late)
    return float(values.min() - 0.08 * np.ptp(values)), min(float(c.mean.min()) for c in curves)


def _every_seed(setting: Setting, indices: Indices) -> Picture | None:
    if all(len(method.runs) == 1 for method in setting.methods):
        return None
    ends = {m.label: [float(r.metrics[-1]["accuracy"]) for r in m.runs] for m in setting.methods}
    return Picture(
        _named("every_seed", setting),
        "Accuracy of every seed",
        "Of the model itself after the last epoch. A mark a seed, a bar at their mean.",
        lambda figure, style: draw_dots(
            figure.subplots(), ends, indices, style, xlabel="test accuracy, %", from_zero=False
        ),
        _seeds_table(ends, ".2f"),
    )


def _seeds_table(values: dict[str, list[float]], form: str) -> list[list[str]]:
    return [
        ["method", "mean", "each seed"],
        *(
            [label, f"{np.mean(found):{form}}", ", ".join(f"{value:{form}}" for value in found)]
            for label, found in values.items()
        ),
    ]


def _sharpness(setting: Setting, indices: Indices) -> Picture | None:
    words = ("sharpness", "sharpness", "Sharpness", "loss rise within rho 0.05")
    meaning = (
        "SAM's measure: how far the training loss rises one step of length 0.05 up the gradient."
    )
    if (curves := _by_epoch(setting, indices, words, meaning)) is not None:
        return curves
    ends = {
        m.label: values
        for m in setting.methods
        if (values := [v for run in m.runs if (v := run.result.get("sharpness")) is not None])
    }
    if not ends:
        return None
    return Picture(
        _named("sharpness", setting),
        "Sharpness at the end",
        f"{meaning} A mark a seed, a bar at their mean.",
        lambda figure, style: draw_dots(figure.subplots(), ends, indices, style, xlabel=words[3]),
        _seeds_table(ends, ".4g"),
    )


def _memory(setting: Setting, indices: Indices) -> Picture | None:
    kept = {
        m.label: m.row["extra_bytes"] / 2**20
        for m in setting.methods
        if m.row["extra_bytes"] is not None
    }
    peak = {
        label: setting.peak_bytes[label] / 2**20 for label in kept if label in setting.peak_bytes
    }
    if not kept:
        return None

    def draw(figure: FigureBase, style: Style) -> None:
        panels = figure.subplots(1, 2 if peak else 1, squeeze=False)[0]
        draw_bars(panels[0], kept, indices, style, xlabel="kept between steps, MiB")
        if peak:
            draw_bars(panels[1], peak, indices, style, xlabel="peak of the GPU, MiB")
            panels[1].set_yticks([])

    columns = ["method", "kept, MiB", *(["peak, MiB"] if peak else [])]
    return Picture(
        _named("memory", setting),
        "Memory",
        "What a method keeps between steps, beside the model and the base optimizer.",
        draw,
        [
            columns,
            *(
                [label, f"{kept[label]:.3f}", *([f"{peak[label]:.1f}"] if label in peak else [])]
                for label in kept
            ),
        ],
    )


def _lines(setting: Setting, indices: Indices) -> Picture | None:
    """Landscapes along one direction."""
    curves = []
    for method in setting.methods:
        for run in method.runs:
            if run.landscape is not None and run.landscape.y is None:
                losses = run.landscape.losses
                curves.append(Curve(method.label, run.landscape.x, losses, losses, losses))
                break
    if not curves:
        return None
    top = common_scale([curve.mean for curve in curves]).top * 2

    def draw(figure: FigureBase, style: Style) -> None:
        axes = figure.subplots()
        draw_curves(
            *(axes, curves, indices, style),
            ylabel="training loss",
            xlabel="distance along the direction",
        )
        axes.set_ylim(top=top)

    return Picture(
        _named("landscape_line", setting),
        "The loss along a line",
        "Through the trained weights, at 0, in a random direction of filter-normalised length.",
        draw,
        _table("distance", [thinned(curve) for curve in curves]),
        by_epoch=True,
    )


@dataclass(frozen=True)
class Surfaces:
    """The landscapes of a setting's runs, on one scale."""

    labels: tuple[str, ...]
    runs: tuple[Run, ...]
    scale: Scale


def surfaces_of(setting: Setting) -> Surfaces | None:
    """All of a setting's landscapes on a grid."""
    found = [
        (method, run)
        for method in setting.methods
        for run in method.runs
        if run.landscape is not None and run.landscape.y is not None
    ]
    if not found:
        return None
    many = len({method.label for method, _ in found}) < len(found)
    labels = [m.label + (f", seed {run.config['seed']}" if many else "") for m, run in found]
    runs = tuple(run for _, run in found)
    losses = [run.landscape.losses for run in runs if run.landscape is not None]
    return Surfaces(tuple(labels), runs, common_scale(losses))


def contour(run: Run, scale: Scale) -> Picture:
    """One run's contours, for the page."""
    landscape: Any = run.landscape
    return Picture(
        f"contours_{run.folder}",
        "Contours",
        "",
        lambda figure, style: draw_contours(figure.subplots(), landscape, scale, style),
        [],
        width=0.55,
        height=0.95,
    )


def landscape_figures(setting: Setting, surfaces: Surfaces) -> dict[str, Figure]:
    """All surfaces and all contours of a setting, as the paper has them: side by side."""
    return {
        _named("landscapes", setting): surfaces_in_a_row(surfaces),
        _named("contours", setting): contours_in_a_row(surfaces),
    }


def surfaces_in_a_row(surfaces: Surfaces) -> Figure:
    """Up to four a row over the whole text width."""
    with rc_context({**PAPER.settings("surfaces"), "font.size": 6.5, "axes.grid": True}):
        rows, columns = _grid(len(surfaces.runs))
        figure = Figure(figsize=(5.5, 1.75 * rows))
        for place, (label, run) in enumerate(zip(surfaces.labels, surfaces.runs, strict=True)):
            landscape: Any = run.landscape
            axes = figure.add_subplot(rows, columns, place + 1, projection="3d")
            draw_surface(axes, landscape, surfaces.scale)
            axes.set_title(label, y=0.98, fontsize=8)
        figure.subplots_adjust(0.01, 0.06, 0.97, 0.93, wspace=0.12)
    return figure


def contours_in_a_row(surfaces: Surfaces) -> Figure:
    """Up to four a row, on one scale."""
    with rc_context(PAPER.settings("contours")):
        rows, columns = _grid(len(surfaces.runs))
        figure = Figure(figsize=(5.5, 1.6 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for axes in panels.flat[len(surfaces.runs) :]:
            axes.set_visible(False)
        for axes, label, run in zip(panels.flat, surfaces.labels, surfaces.runs, strict=False):
            landscape: Any = run.landscape
            draw_contours(axes, landscape, surfaces.scale, PAPER)
            axes.set_title(label)
    return figure


def _grid(count: int) -> tuple[int, int]:
    columns = min(count, 4)
    return math.ceil(count / columns), columns


def write_figures(settings: Sequence[Setting], folder: Path) -> list[Path]:
    """Every figure of a report, as files at paper quality."""
    folder.mkdir(parents=True, exist_ok=True)
    indices = indices_of(settings)
    first = accuracy_against_speed(settings, indices)
    pictures = [first] if first else []
    figures: dict[str, Figure] = {}
    for setting in settings:
        pictures += pictures_of(setting, indices)
        if (surfaces := surfaces_of(setting)) is not None:
            figures |= landscape_figures(setting, surfaces)
    figures = {p.name: render(p, PAPER) for p in pictures} | figures
    for name, figure in figures.items():
        save(figure, folder / name)
    return [folder / name for name in figures]


def thinned(curve: Curve) -> Curve:
    """A curve of so many points at most, its last one included."""
    step = math.ceil(len(curve.x) / _MOST_POINTS)
    if step == 1:
        return curve
    keep = np.arange(len(curve.x) - 1, -1, -step)[::-1]
    return Curve(curve.label, curve.x[keep], curve.mean[keep], curve.low[keep], curve.high[keep])


def _table(first: str, curves: Sequence[Curve]) -> list[list[str]]:
    by_x: dict[float, dict[str, float]] = {}
    for curve in curves:
        for x, value in zip(curve.x.tolist(), curve.mean.tolist(), strict=True):
            by_x.setdefault(x, {})[curve.label] = value
    lines = [[first, *(curve.label for curve in curves)]]
    for x, values in sorted(by_x.items()):
        cells = (values.get(curve.label) for curve in curves)
        lines.append([f"{x:g}", *("" if v is None else f"{v:.4g}" for v in cells)])
    return lines


def _named(name: str, setting: Setting) -> str:
    """A file's name, of letters that every system allows."""
    model = "".join(c if c.isalnum() else "_" for c in setting.name).strip("_")
    return f"{name}_{model}"
