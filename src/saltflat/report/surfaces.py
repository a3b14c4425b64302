"""Drawings of loss surfaces on one scale: for `landscape --figures`, paper and the page."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from mpl_toolkits.mplot3d.art3d import Poly3DCollection

from saltflat.landscape import Surface
from saltflat.landscape.scale import Scale, common_scale
from saltflat.report.alike import Landscape, alike
from saltflat.report.records import Run, Setting
from saltflat.report.style import PAPER, TEXT_WIDTH, Style, wrapped

_MOST_CELLS = 128
"""Points along a side of a surface on the page; a finer surface is thinned."""
_ABOVE = 4.0
"""Height at which the page can still cut, relative to the scale."""
_COLUMNS = 4
_SMOOTH = 120
"""Fewest points along a side of a surface in 3D."""
_STYLES = ("-", "--", "-.", ":")
_AXES = {
    "random": ("first random direction", "second random direction"),
    "between": ("from the first run (0) to the second (1)",),
    "trajectory": ("first principal component", "second principal component"),
}
"""Names of the coordinates, by the kind of the directions."""


@dataclass(frozen=True)
class Surfaces:
    """Surfaces on grids by their labels, and the scale for all of them."""

    shown: Mapping[str, Surface]
    scale: Scale

    @property
    def commands(self) -> list[str]:
        """The commands that made the surfaces, where known."""
        found = (one.provenance.get("command") for one in self.shown.values())
        return [line for line in dict.fromkeys(found) if line]


def planes(setting: Setting) -> tuple[list[Landscape], list[str]]:
    """The planes of a setting that can be compared, and notes about the others."""

    def plane(run: Run) -> Surface | None:
        return None if run.landscape is None or run.landscape.y is None else run.landscape

    return alike(setting, plane)


def surfaces_of(setting: Setting) -> Surfaces | None:
    """The planes of a setting that can be compared, if there are any."""
    found, _ = planes(setting)
    if not found:
        return None
    once = len({label for label, _, _ in found}) == len(found)
    shown = {
        f"{label}{'' if once else f', seed {seed}'}{'' if one.complete else ', unfinished'}": one
        for label, seed, one in found
    }
    return Surfaces(shown, common_scale(one.losses for one in shown.values()))


def surfaces_in_a_row(surfaces: Surfaces) -> Figure:
    """3D surfaces over the whole text width, up to four in a row, as in the paper."""
    with rc_context({**PAPER.settings("surfaces"), "font.size": 6.5}):
        rows, columns = _grid(len(surfaces.shown))
        figure = Figure(figsize=(TEXT_WIDTH, 1.6 * rows))
        for place, (label, surface) in enumerate(surfaces.shown.items(), 1):
            axes: Any = figure.add_subplot(rows, columns, place, projection="3d")
            draw_surface(axes, surface, surfaces.scale)
            axes.set_box_aspect((1, 1, 0.7))
            axes.tick_params(labelsize=6, pad=-4)
            bottom = 0 if surfaces.scale.bottom < surfaces.scale.top / 50 else surfaces.scale.bottom
            for axis, ends in (
                (axes.xaxis, surface.x),
                (axes.yaxis, np.asarray(surface.y)),
                (axes.zaxis, (bottom, surfaces.scale.top)),
            ):
                axis.set_ticks([ends[0], ends[-1]])
                axis.set_major_formatter("{x:.2g}")
                axis.pane.set_visible(False)
            axes.set_title(wrapped(label), y=0.97, fontsize=8)
        figure.subplots_adjust(0.0, 0.07, 0.965, 0.93, wspace=0.1)
    return figure


def contours_in_a_row(surfaces: Surfaces) -> Figure:
    """Contours over the whole text width, up to four in a row."""
    with rc_context(PAPER.settings("contours")):
        rows, columns = _grid(len(surfaces.shown))
        size = (TEXT_WIDTH, 1.55 * rows)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for axes in panels.flat[len(surfaces.shown) :]:
            axes.set_visible(False)
        for axes, (label, surface) in zip(panels.flat, surfaces.shown.items(), strict=False):
            _contours(axes, surface, surfaces.scale)
            axes.set_title(wrapped(label))
    return figure


def contours_alone(surface: Surface, scale: Scale, style: Style, salt: str) -> Figure:
    """Contours of one surface, for a column of the page."""
    with rc_context(style.settings(salt)):
        figure = Figure(figsize=(3.1, 2.95), layout="constrained")
        _contours(figure.subplots(), surface, scale)
    return figure


def _contours(axes: Any, surface: Surface, scale: Scale) -> None:
    draw_contours(axes, surface, scale)
    for spine in axes.spines.values():
        spine.set_visible(True)
    for axis, values in ((axes.xaxis, surface.x), (axes.yaxis, np.asarray(surface.y))):
        axis.set_ticks([values[0], (values[0] + values[-1]) / 2, values[-1]])
        axis.set_major_formatter("{x:.2g}")


def _grid(count: int) -> tuple[int, int]:
    """Rows and columns of panels."""
    columns = min(count, _COLUMNS)
    return math.ceil(count / columns), columns


def packed(surfaces: Surfaces) -> dict[str, Any]:
    """The surfaces as data for the page's script."""
    scale = surfaces.scale
    ceiling = scale.bottom + _ABOVE * (scale.top - scale.bottom)
    return {
        "bottom": scale.bottom,
        "top": scale.top,
        "ceiling": ceiling,
        "levels": scale.levels,
        "colors": color_stops(32),
        "surfaces": [_packed(one, scale.bottom, ceiling) for one in surfaces.shown.values()],
    }


def color_stops(count: int) -> list[list[int]]:
    """Colours from the lowest loss to the highest, as red, green and blue from 0 to 255."""
    return [[round(255 * part) for part in colors()(i / (count - 1))[:3]] for i in range(count)]


def _packed(surface: Surface, bottom: float, ceiling: float) -> dict[str, Any]:
    """Losses as 16-bit integers from the bottom to the ceiling; 65535 is above it."""
    rows, columns = (
        np.unique(np.linspace(0, n - 1, min(n, _MOST_CELLS)).round().astype(int))
        for n in surface.losses.shape
    )
    losses = surface.losses[np.ix_(rows, columns)].astype(float)
    share = np.clip((losses - bottom) / (ceiling - bottom), 0, 1)
    steps = np.nan_to_num(share * 65535, nan=65535.0).round().astype("<u2")
    return {
        "columns": len(columns),
        "rows": len(rows),
        "x": [float(surface.x[0]), float(surface.x[-1])],
        "y": [] if surface.y is None else [float(surface.y[0]), float(surface.y[-1])],
        "losses": base64.b64encode(steps.tobytes()).decode(),
    }


def draw(surfaces: Mapping[str, Surface], folder: Path, name: str = "landscape") -> list[Path]:
    """Draw surfaces side by side, as PNG and SVG: grids as contours and in 3D, lines in one plot.

    Args:
        surfaces: Surfaces by their titles; all lines, or all grids.
        folder: Folder for the files.
        name: Beginning of the files' names.

    Returns:
        The files.

    Raises:
        ValueError: If a surface is not complete, or lines and grids are mixed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if all(surface.y is not None for surface in surfaces.values()):
        figures = {"contours": contours(surfaces), "surfaces": surfaces_3d(surfaces)}
    else:
        figures = {"lines": lines(surfaces)}
    paths = []
    for kind, figure in figures.items():
        for suffix in (".png", ".svg"):
            paths.append(folder / f"{name}_{kind}{suffix}")
            figure.savefig(paths[-1], dpi=200)
    return paths


def contours(surfaces: Mapping[str, Surface]) -> Figure:
    """Contour lines of each grid, with a cross at the weights or the path to them."""
    scale = common_scale(_losses(surfaces, 2))
    figure, panels = _panels(surfaces, height=3.0)
    for axes, surface in zip(panels, surfaces.values(), strict=True):
        draw_contours(axes, surface, scale)
        axes.tick_params(labelsize=7)
        _name_axes(axes, surface)
    return figure


def surfaces_3d(surfaces: Mapping[str, Surface]) -> Figure:
    """Each grid as a surface in 3D, cut at the top of the scale."""
    scale = common_scale(_losses(surfaces, 2))
    figure, panels = _panels(surfaces, height=3.4, projection="3d")
    for axes, surface in zip(panels, surfaces.values(), strict=True):
        draw_surface(axes, surface, scale)
        axes.set_zlabel("loss", fontsize=8, labelpad=-6)
        axes.tick_params(labelsize=6, pad=-3)
        axes.set_box_aspect((1, 1, 0.8), zoom=0.82)  # room for the labels
        _name_axes(axes, surface)
        axes.xaxis.labelpad = axes.yaxis.labelpad = -8
    return figure


def lines(surfaces: Mapping[str, Surface]) -> Figure:
    """The losses along lines in one plot, with dots at the models."""
    losses = _losses(surfaces, 1)
    finite = np.concatenate([found[np.isfinite(found)] for found in losses])
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    for number, (title, surface) in enumerate(surfaces.items()):
        style = _STYLES[number % len(_STYLES)]
        (drawn,) = axes.plot(surface.x, surface.losses, style, label=title)
        at = surface.marks[:, 0]
        axes.plot(at, np.interp(at, surface.x, surface.losses), "o", color=drawn.get_color())
    if finite.size and finite.min() > 0 and finite.max() > 30 * finite.min():
        axes.set_yscale("log")
    axes.set_ylabel("loss")
    _name_axes(axes, next(iter(surfaces.values())))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def colors() -> ListedColormap:
    """Deep blue to pale sand with evenly rising lightness, readable in grey."""
    return ListedColormap(colormaps["YlGnBu_r"](np.linspace(0.04, 0.93, 256)))


def draw_contours(axes: Axes, surface: Surface, scale: Scale) -> None:
    """Contour lines of one grid; blank where the loss is above the scale."""
    levels = np.array(scale.levels)
    middles = np.sqrt(np.concatenate([levels[:1], levels[:-1]]) * levels)
    grid = (surface.x, surface.y, np.ma.masked_invalid(surface.losses))
    axes.contourf(
        *grid,
        levels=[min(scale.bottom, levels[0] - 1e-9), *levels],
        colors=colors()(scale.shade(middles)),
    ).set_edgecolor("face")  # or some viewers show seams
    drawn = axes.contour(*grid, levels=scale.levels, colors="#10202c", linewidths=0.45)
    size = float(rcParams["font.size"])
    axes.clabel(drawn, levels[:-1][::-3], fontsize=size * 0.72, fmt="%g")
    # A dark edge: above the scale the ground is as light as the path.
    edge: Any = {"color": "white", "path_effects": [withStroke(linewidth=2, foreground="#10202c")]}
    axes.plot(*surface.marks.T, ".-", linewidth=0.8, markersize=2, **edge)
    axes.plot(*surface.marks[-1], "+", markersize=size * 0.7, **edge)
    axes.set_box_aspect(1)
    axes.grid(visible=False)


def draw_surface(axes: Any, surface: Surface, scale: Scale) -> None:
    """One grid in 3D, with a level rim at the cut."""
    x, y, losses = _finer(surface)
    corners = np.dstack([*np.meshgrid(x, y), losses])
    cells = np.stack(
        [corners[:-1, :-1], corners[:-1, 1:], corners[1:, 1:], corners[1:, :-1]], axis=2
    ).reshape(-1, 4, 3)
    # plot_surface draws parts of cells beside a hole, with uninitialised memory in them.
    heights = cells[..., 2]
    cells = cells[np.isfinite(heights).all(1) & (heights.min(1) <= scale.top)]
    cells[..., 2] = np.minimum(cells[..., 2], scale.top)
    axes.add_collection3d(
        Poly3DCollection(
            cells,
            facecolors=colors()(scale.shade(cells[:, 0, 2])),
            shade=True,
            linewidth=0,
            antialiased=False,
            rasterized=True,  # ten thousand polygons make an SVG too large to open
        )
    )
    axes.auto_scale_xyz(x[[0, -1]], y[[0, -1]], [scale.bottom, scale.top])
    axes.set_zlim(scale.bottom, scale.top)
    axes.view_init(elev=36, azim=-52)


def _losses(surfaces: Mapping[str, Surface], dimensions: int) -> list[np.ndarray]:
    """The losses, after a check that every surface is complete and of these dimensions."""
    for title, surface in surfaces.items():
        if surface.losses.ndim != dimensions:
            raise ValueError(
                f"surfaces must be all lines or all grids, got {title!r} of {surface.losses.ndim} "
                "dimensions: draw it in another figure"
            )
        if not surface.complete:
            raise ValueError(
                f"surfaces must be complete, got {title!r} with {surface.done} of "
                f"{surface.losses.size} points: run the same command again"
            )
    return [surface.losses for surface in surfaces.values()]


def _panels(
    surfaces: Mapping[str, Surface], *, height: float, **options: Any
) -> tuple[Figure, list[Any]]:
    """A figure with a titled panel for each surface."""
    rows, columns = _grid(len(surfaces))
    figure = Figure(figsize=(3.2 * columns, height * rows), layout="constrained")
    panels = []
    for number, title in enumerate(surfaces, start=1):
        panels.append(figure.add_subplot(rows, columns, number, **options))
        panels[-1].set_title(title, fontsize=9)
    return figure, panels


def _finer(surface: Surface) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses interpolated until a cut looks smooth; inf where unknown."""
    old_x, old_y = surface.x, np.asarray(surface.y)
    x, y = (np.linspace(old[0], old[-1], max(len(old), _SMOOTH)) for old in (old_x, old_y))
    losses = np.stack([np.interp(x, old_x, row) for row in surface.losses])
    losses = np.stack([np.interp(y, old_y, column) for column in losses.T], axis=1)
    return x, y, np.nan_to_num(losses, nan=np.inf)


def _name_axes(axes: Any, surface: Surface) -> None:
    names = list(_AXES[surface.provenance["settings"]["kind"]])
    shares = surface.provenance.get("explained", [])
    names[: len(shares)] = [f"{n} ({s:.0%})" for n, s in zip(names, shares, strict=False)]
    both = [axes.xaxis, axes.yaxis][: surface.losses.ndim]
    for axis, name in zip(both, names, strict=False):
        axis.set_label_text(name, fontsize=8)
        axis.set_major_locator(MaxNLocator(5))
