"""The landscapes of compared runs on one scale: for paper, and for the page to turn."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from saltflat.landscape import Surface
from saltflat.landscape.plot import colors, draw_contours, draw_surface
from saltflat.landscape.scale import Scale, common_scale
from saltflat.report.alike import Landscape, alike
from saltflat.report.records import Run, Setting
from saltflat.report.style import PAPER, TEXT_WIDTH, Style, wrapped

_MOST_CELLS = 128
"""Of a surface's side on the page; a finer one is thinned."""
_ABOVE = 4.0
"""How many times higher than the scale the page can cut."""


@dataclass(frozen=True)
class Surfaces:
    """Surfaces on grids by their labels, and the scale for all of them."""

    shown: Mapping[str, Surface]
    scale: Scale

    @property
    def commands(self) -> list[str]:
        """Those that made them, as far as they were recorded."""
        found = (one.provenance.get("command") for one in self.shown.values())
        return [line for line in dict.fromkeys(found) if line]


def planes(setting: Setting) -> tuple[list[Landscape], list[str]]:
    """Those of a setting's runs that can be compared, and what is to be said of them."""

    def plane(run: Run) -> Surface | None:
        return None if run.landscape is None or run.landscape.y is None else run.landscape

    return alike(setting, plane)


def surfaces_of(setting: Setting) -> Surfaces | None:
    """Those of a setting's runs that can be compared, if there are any."""
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
    """Up to four a row over the whole text width, as the paper has them."""
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
    """Up to four a row over the whole text width."""
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
    """One surface's, for a column of the page."""
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
    columns = min(count, 4)
    return math.ceil(count / columns), columns


def packed(surfaces: Surfaces) -> dict[str, Any]:
    """What the page needs to draw them."""
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
    """Colours from the lowest loss to the highest, as red, green and blue to 255."""
    return [[round(255 * part) for part in colors()(i / (count - 1))[:3]] for i in range(count)]


def _packed(surface: Surface, bottom: float, ceiling: float) -> dict[str, Any]:
    """Two bytes a point, from the bottom to the ceiling; 65535 is more."""
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
