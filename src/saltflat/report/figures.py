"""Pictures of measurements, each drawn on axes that someone else laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from saltflat.report.records import Curve
from saltflat.report.style import DASHES, MARKERS, PAPER, Style, wrapped

Indices = Mapping[str, int]
"""A method's place among all of a report, from which its colour, dash and marker follow."""
_STEPS = (1, 2, 5, 10)
"""Between numbers on an axis."""


def save(figure: Figure, path: Path) -> None:
    """Write a picture as .svg, .pdf and .png, fonts included."""
    with rc_context(PAPER.settings(path.name)):
        for suffix in (".svg", ".pdf", ".png"):
            figure.savefig(path.with_name(path.name + suffix), dpi=300)


def accuracy_speed(rows: Sequence[Mapping[str, Any]], path: Path) -> Figure:
    """Accuracy against speed of one model's methods, as files.

    Args:
        rows: Of each method its "method", "accuracy" in percent and "images_per_second".
        path: Where the picture goes, without a suffix.

    Returns:
        The picture.
    """
    with rc_context(PAPER.settings(path.name)):
        figure = Figure(figsize=(4.5, 3.2), layout="constrained")
        lines = {
            row["method"]: [
                Point(row["images_per_second"], row["accuracy"], row["accuracy"], row["accuracy"])
            ]
            for row in rows
        }
        draw_points(figure.subplots(), lines, {name: i for i, name in enumerate(lines)}, PAPER)
        save(figure, path)
    return figure


class Point(NamedTuple):
    """A method's speed and accuracy, with the ends of the accuracy's interval."""

    speed: float
    accuracy: float
    low: float
    high: float


def draw_points(
    axes: Axes, lines: Mapping[str, Sequence[Point]], indices: Indices, style: Style
) -> None:
    """Accuracy against speed; up and to the right is better. A line joins a method's models."""
    for label, points in lines.items():
        index = indices[label]
        speed, accuracy, low, high = np.array(sorted(points)).T
        colour, marker = style.of(index), MARKERS[index % len(MARKERS)]
        axes.vlines(speed, low, high, color=colour, linewidth=1, alpha=0.55)
        axes.plot(
            *(speed, accuracy),
            color=colour,
            linestyle=DASHES[index % len(DASHES)] if len(points) > 1 else "none",
            marker=marker,
            markersize=style.font * 0.62,
            markeredgecolor=style.background,
            markeredgewidth=0.8,
        )
    axes.set_xlabel("training speed, images/s")
    axes.set_ylabel("test accuracy, %")
    axes.margins(0.12)
    axes.set_xlim(left=0)  # so that twice as far is twice as fast
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _name_points(axes, lines, indices, style)


def _name_points(axes: Axes, lines: Mapping[str, Any], indices: Indices, style: Style) -> None:
    """A name beside each method's fastest point, where it lies on nothing else."""
    figure: Any = axes.get_figure(root=True)
    figure.draw_without_rendering()  # from here on, places in pixels are known
    points = [point for method in lines.values() for point in method]
    taken = [
        Bbox.from_extents(x - 4, low - 4, x + 4, high + 4)
        for point in points
        for (x, low), (_, high) in [
            axes.transData.transform([(point.speed, point.low), (point.speed, point.high)])
        ]
    ]
    step = style.font
    for label, method in lines.items():
        fastest = max(method)
        for side, up in product((1, -1), (0, step, -step, 2 * step, -2 * step)):
            text = axes.annotate(
                wrapped(label),
                (fastest.speed, fastest.accuracy),
                (7 * side, up),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                va="center",
                color=style.of(indices[label]),
                fontweight="bold",
            )
            box = text.get_window_extent()
            inside = axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1
            if inside and not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        else:
            axes.add_artist(text)  # there is no free place
        taken.append(box)


def draw_curves(
    axes: Axes,
    curves: Sequence[Curve],
    indices: Indices,
    style: Style,
    *,
    ylabel: str,
    xlabel: str = "epoch",
    log: bool = False,
    bottom: float | None = None,
    top: float | None = None,
) -> None:
    """A line a method with the range of its seeds, named at its end."""
    for curve in curves:
        index = indices[curve.label]
        colour = style.of(index)
        if np.any(curve.high > curve.low):
            low = np.maximum(curve.low, curve.mean / 50) if log else curve.low
            axes.fill_between(curve.x, low, curve.high, color=colour, alpha=0.13, linewidth=0)
        axes.plot(
            *(curve.x, curve.mean),
            color=colour,
            linestyle=DASHES[index % len(DASHES)],
            marker=MARKERS[index % len(MARKERS)],
            markevery=(len(curve.x) - 1, max(1, len(curve.x))) if len(curve.x) > 12 else 1,
            markersize=style.font * 0.42,
        )
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=_STEPS))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_STEPS, integer=xlabel == "epoch"))
    axes.margins(x=0.01)
    axes.set_ylim(bottom, top)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    _name_curves(axes, curves, indices, style)


def _name_curves(axes: Axes, curves: Sequence[Curve], indices: Indices, style: Style) -> None:
    """Names to the right of the axes, at the curves' ends as far as there is room."""
    if not curves:
        return
    ends = [axes.transData.transform((0, curve.mean[-1]))[1] for curve in curves]
    bottom, top = (axes.transAxes.transform((0, at))[1] for at in (0, 1))
    figure: Any = axes.get_figure(root=True)
    inches = figure.get_size_inches()[1] * 0.78  # of the axes, roughly
    lines = max(wrapped(curve.label).count("\n") + 1 for curve in curves)
    gap = lines * style.font * 1.3 / 72 / inches
    wanted = [min(1.0, max(0.0, (end - bottom) / (top - bottom))) for end in ends]
    for curve, at, y in zip(curves, wanted, spread(wanted, gap), strict=True):
        colour = style.of(indices[curve.label])
        axes.plot(
            *([1.005, 1.03, 1.05], [at, y, y]),
            transform=axes.transAxes,
            color=colour,
            linewidth=0.7,
            clip_on=False,
        )
        axes.text(
            *(1.06, y, wrapped(curve.label)),
            transform=axes.transAxes,
            va="center",
            color=colour,
            fontweight="bold",
        )


def logarithmic(values: NDArray[np.float64]) -> bool:
    """Whether figures range so far that only a logarithmic axis shows them all."""
    return bool(np.all(values > 0) and values.max() > 30 * values.min())


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions near the wanted ones, in their order, that are a gap apart.

    Example:
        >>> spread([0.5, 0.5, 0.9], 0.2)
        [0.4, 0.6, 0.9]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[list[int]] = []

    def centre(group: list[int]) -> float:
        return sum(wanted[i] for i in group) / len(group)

    for i in order:
        groups.append([i])
        while len(groups) > 1 and (
            centre(groups[-1]) - centre(groups[-2])
            < gap * (len(groups[-1]) + len(groups[-2])) / 2 - 1e-12
        ):
            last = groups.pop()
            groups[-1] += last
    found = [0.0] * len(wanted)
    for group in groups:
        for place, i in enumerate(group):
            found[i] = round(centre(group) + gap * (place - (len(group) - 1) / 2), 9)
    return found


def draw_bars(
    axes: Axes, values: Mapping[str, float], indices: Indices, style: Style, *, xlabel: str
) -> None:
    """A bar a method, with its number."""
    labels = list(values)
    for place, label in enumerate(labels):
        axes.barh(place, values[label], height=0.56, color=style.of(indices[label]))
        axes.annotate(
            f"{values[label]:,.2f}" if values[label] < 100 else f"{values[label]:,.0f}",
            (values[label], place),
            (5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(labels)), [wrapped(label) for label in labels])
    axes.tick_params(axis="y", length=0, labelcolor=style.ink)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.22 * (max(values.values()) or 1.0))
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=_STEPS))
    axes.set_xlabel(xlabel)


def draw_dots(
    axes: Axes,
    values: Mapping[str, Sequence[float]],
    indices: Indices,
    style: Style,
    *,
    xlabel: str,
    from_zero: bool = True,
) -> None:
    """Every seed a dot, their mean a bar through them."""
    labels = list(values)
    for place, label in enumerate(labels):
        colour, marker = style.of(indices[label]), MARKERS[indices[label] % len(MARKERS)]
        seeds = values[label]
        axes.plot(
            *(seeds, [place] * len(seeds)),
            linestyle="none",
            marker=marker,
            color=colour,
            markersize=style.font * 0.62,
            alpha=0.75,
        )
        axes.vlines(np.mean(seeds), place - 0.3, place + 0.3, color=colour, linewidth=2)
    axes.set_yticks(range(len(labels)), [wrapped(label) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=style.ink)
    axes.grid(axis="y", visible=False)
    if logarithmic(np.concatenate([np.asarray(v) for v in values.values()])):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        if from_zero:
            axes.set_xlim(left=min(0.0, *(min(v) for v in values.values())))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    axes.set_xlabel(xlabel)
