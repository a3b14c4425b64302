"""Which pictures a report has: each drawn once, for the page and as files, with its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure, FigureBase

from saltflat.landscape.scale import common_scale
from saltflat.report.alike import alike
from saltflat.report.figures import (
    Indices,
    Point,
    draw_bars,
    draw_curves,
    draw_dots,
    draw_points,
    logarithmic,
    save,
)
from saltflat.report.records import Curve, Setting
from saltflat.report.style import PAPER, Style
from saltflat.report.surfaces import contours_in_a_row, surfaces_in_a_row, surfaces_of

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
    by_epoch: bool = False
    """Whether the table's first column is the picture's horizontal axis."""


def render(picture: Picture, style: Style) -> Figure:
    """Draw a picture in a style."""
    with rc_context(style.settings(picture.name)):
        figure = Figure(figsize=(style.width, 0.64 * style.width), layout="constrained")
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
    ends = {m.label: [run.accuracies[-1] for run in m.runs] for m in setting.methods}
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
    if not any(kept.values()):
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
    """Landscapes along one direction, the first of each method."""
    found, notes = alike(setting, lambda run: run.line)
    lines = {one.label: one.surface for one in reversed(found)}
    curves = []
    for label in (method.label for method in setting.methods if method.label in lines):
        line = lines[label]
        losses = np.nan_to_num(line.losses[: line.done], nan=np.inf, posinf=np.inf)
        curves.append(Curve(label, line.x[: line.done], losses, losses, losses))
        if not line.complete:
            notes.append(f"{label} is unfinished.")
    if not curves:
        return None
    ends = [end for line in lines.values() for end in (line.x[0], line.x[-1])]
    scale = common_scale([curve.mean for curve in curves])
    top = scale.top * 2

    def draw(figure: FigureBase, style: Style) -> None:
        axes = figure.subplots()
        draw_curves(
            *(axes, curves, indices, style),
            ylabel="training loss",
            xlabel="distance along the direction",
            bottom=scale.bottom - (top - scale.bottom) / 20,
            top=top,
        )
        axes.set_xlim(min(ends), max(ends))

    return Picture(
        _named("landscape_line", setting),
        "The loss along a line",
        " ".join(
            [
                "Through the trained weights, at 0, in a random direction of filter-normalised "
                "length.",
                *notes,
            ]
        ),
        draw,
        _table("distance", [thinned(curve) for curve in curves]),
        by_epoch=True,
    )


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
            figures[_named("landscapes", setting)] = surfaces_in_a_row(surfaces)
            figures[_named("contours", setting)] = contours_in_a_row(surfaces)
    figures |= {picture.name: render(picture, PAPER) for picture in pictures}
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
