"""The paper's figures 1, 2, 4 and 5, laid out as there, from one's own runs.

Figure 3 is a drawing. Figures 2 and 5 are the landscapes of two models: here the first two that
have some.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from saltflat.report.figures import Indices, save
from saltflat.report.pictures import (
    accuracy_against_speed,
    indices_of,
    pictures_of,
    render,
)
from saltflat.report.records import Setting, tracked
from saltflat.report.style import PAPER, TEXT_WIDTH
from saltflat.report.surfaces import surfaces_in_a_row, surfaces_of


def write_paper(settings: Sequence[Setting], folder: Path) -> list[str]:
    """Write figure1, figure2, figure4 and figure5 as .svg, .pdf and .png.

    Returns:
        A sentence for each figure that lacks its data, with what to run.
    """
    figures, missing = paper_figures(settings)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        save(figure, folder / name)
    return missing


def paper_figures(settings: Sequence[Setting]) -> tuple[dict[str, Figure], list[str]]:
    """The figures, and what the others lack."""
    figures: dict[str, Figure] = {}
    missing = []
    first = accuracy_against_speed(settings, indices_of(settings))
    if first is not None:
        figures["figure1"] = render(first, PAPER)
    else:
        missing.append("figure 1 needs speeds: let the runs end")
    curves = (s for s in settings if any(len(m.curve("sharpness").x) for m in s.methods))
    if (setting := next(curves, None)) is not None:
        figures["figure4"] = _loss_and_sharpness(setting, indices_of(settings))
    else:
        lack = "no value is a number" if tracked(settings) else "train with --track_sharpness 1"
        missing.append(f"figure 4 needs sharpness by epoch: {lack}")
    shown = [found for setting in settings if (found := surfaces_of(setting)) is not None]
    for name, found in zip(("figure2", "figure5"), shown, strict=False):
        figures[name] = surfaces_in_a_row(found)
    if not shown:
        missing.append(f"figure 2 needs landscapes: {settings[0].landscape_command}")
    if len(shown) < 2:
        missing.append("figure 5 is figure 2 of a second model: name its comparison too")
    return figures, missing


def _loss_and_sharpness(setting: Setting, indices: Indices) -> Figure:
    """Training loss to the left, sharpness to the right."""
    panels = {p.title: p for p in pictures_of(setting, indices)}
    with rc_context(PAPER.settings("figure4")):
        figure = Figure(figsize=(TEXT_WIDTH, 2.0), layout="constrained")
        parts: Any = figure.subfigures(1, 2)
        left, right = parts
        panels["Training loss"].draw(left, PAPER)
        panels["Sharpness"].draw(right, PAPER)
    return figure
