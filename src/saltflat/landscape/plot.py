"""Pictures of surfaces, side by side on one scale; all that needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from saltflat.landscape.scale import Scale, common_scale
from saltflat.landscape.surface import Surface

try:
    from matplotlib import colormaps, rcParams
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection
except ImportError as error:
    raise ImportError("pictures need: pip install 'saltflat[report]'") from error

_COLUMNS = 4
_SMOOTH = 120
"""Points along a side of a surface in space, at least."""
_STYLES = ("-", "--", "-.", ":")


def draw(surfaces: Mapping[str, Surface], folder: Path, name: str = "landscape") -> list[Path]:
    """Draw all that surfaces allow, as PNG and SVG.

    Args:
        surfaces: By their titles; all lines, or all grids.
        folder: Where the pictures go.
        name: What their names begin with.

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
    """Lines of equal loss, of each grid; a cross at the weights, or the way to them."""
    scale = common_scale(_losses(surfaces, 2))
    figure, panels = _panels(surfaces, height=3.0)
    for axes, surface in zip(panels, surfaces.values(), strict=True):
        draw_contours(axes, surface, scale)
        axes.tick_params(labelsize=7)
        _name_axes(axes, surface)
    return figure


def surfaces_3d(surfaces: Mapping[str, Surface]) -> Figure:
    """Each grid as a surface in space, cut where the scale ends."""
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


def colors() -> ListedColormap:
    """Of losses: from deep blue to pale sand, evenly lighter, so that grey is enough to read it."""
    return ListedColormap(colormaps["YlGnBu_r"](np.linspace(0.04, 0.93, 256)))


def draw_contours(axes: Axes, surface: Surface, scale: Scale) -> None:
    """One grid's lines of equal loss; nothing where the loss is above the scale."""
    levels = np.array(scale.levels)
    middles = np.sqrt(np.concatenate([levels[:1], levels[:-1]]) * levels)
    place = (surface.x, surface.y, np.ma.masked_invalid(surface.losses))
    axes.contourf(
        *place,
        levels=[min(scale.bottom, levels[0] - 1e-9), *levels],
        colors=colors()(scale.shade(middles)),
    ).set_edgecolor("face")  # or a viewer may show seams
    drawn = axes.contour(*place, levels=scale.levels, colors="#10202c", linewidths=0.45)
    size = float(rcParams["font.size"])
    axes.clabel(drawn, levels[:-1][::-3], fontsize=size * 0.72, fmt="%g")
    # A dark edge, since above the scale the ground is as light as the path.
    edge: Any = {"color": "white", "path_effects": [withStroke(linewidth=2, foreground="#10202c")]}
    axes.plot(*surface.marks.T, ".-", linewidth=0.8, markersize=2, **edge)
    axes.plot(*surface.marks[-1], "+", markersize=size * 0.7, **edge)
    axes.set_box_aspect(1)
    axes.grid(visible=False)


def draw_surface(axes: Any, surface: Surface, scale: Scale) -> None:
    """One grid in space, with a level rim where it is cut."""
    x, y, losses = _finer(surface)
    corners = np.dstack([*np.meshgrid(x, y), losses])
    cells = np.stack(
        [corners[:-1, :-1], corners[:-1, 1:], corners[1:, 1:], corners[1:, :-1]], axis=2
    ).reshape(-1, 4, 3)
    # plot_surface would keep parts of cells beside a hole, filled up with memory as it was found.
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
            rasterized=True,  # ten thousand polygons would make the SVG too heavy to open
        )
    )
    axes.auto_scale_xyz(x[[0, -1]], y[[0, -1]], [scale.bottom, scale.top])
    axes.set_zlim(scale.bottom, scale.top)
    axes.view_init(elev=36, azim=-52)


def lines(surfaces: Mapping[str, Surface]) -> Figure:
    """The losses along lines, in one picture; dots at the models themselves."""
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


def _losses(surfaces: Mapping[str, Surface], dimensions: int) -> list[np.ndarray]:
    """Those of complete surfaces of so many dimensions."""
    for title, surface in surfaces.items():
        if surface.losses.ndim != dimensions:
            raise ValueError(f"{title}: lines and grids do not fit in one picture, draw them apart")
        if not surface.complete:
            raise ValueError(
                f"{title} has {surface.done} of {surface.losses.size} places: finish it first"
            )
    return [surface.losses for surface in surfaces.values()]


def _panels(
    surfaces: Mapping[str, Surface], *, height: float, **how: Any
) -> tuple[Figure, list[Any]]:
    """A figure with a place for each surface, under its title."""
    columns = min(len(surfaces), _COLUMNS)
    rows = -(-len(surfaces) // columns)
    figure = Figure(figsize=(3.2 * columns, height * rows), layout="constrained")
    panels = []
    for number, title in enumerate(surfaces, start=1):
        panels.append(figure.add_subplot(rows, columns, number, **how))
        panels[-1].set_title(title, fontsize=9)
    return figure, panels


def _finer(surface: Surface) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses with so many between them that a cut looks smooth; what is unknown is inf."""
    x, y = (
        np.linspace(old[0], old[-1], max(len(old), _SMOOTH)) for old in (surface.x, _rows(surface))
    )
    losses = np.stack([np.interp(x, surface.x, row) for row in surface.losses])
    losses = np.stack([np.interp(y, _rows(surface), column) for column in losses.T], axis=1)
    return x, y, np.nan_to_num(losses, nan=np.inf)


def _rows(surface: Surface) -> np.ndarray:
    assert surface.y is not None  # as _losses has seen
    return surface.y


def _name_axes(axes: Any, surface: Surface) -> None:
    """Say what the coordinates are."""
    kind = surface.provenance["settings"]["kind"]
    names = {
        "random": ["first random direction", "second random direction"],
        "between": ["from the first run (0) to the second (1)"],
        "trajectory": ["first principal component", "second principal component"],
    }[kind]
    shares = surface.provenance.get("explained", [])
    names[: len(shares)] = [f"{n} ({s:.0%})" for n, s in zip(names, shares, strict=False)]
    both = [axes.xaxis, axes.yaxis][: surface.losses.ndim]
    for axis, name in zip(both, names, strict=False):
        axis.set_label_text(name, fontsize=8)
        axis.set_major_locator(MaxNLocator(5))
