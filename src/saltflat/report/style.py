"""How pictures look: the same drawing for the page, where CSS has the colours, and for paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PALETTE = (
    *("#59636b", "#b45510", "#0b7a75", "#7b3fa0"),
    *("#2b6cb0", "#b83260", "#6b7d13", "#8c5a2b"),
)
"""Of the methods, the base first; page.css has the same for light and others for dark."""
DASHES: tuple[Any, ...] = (
    *("-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (6, 2, 1.2, 2))),
    *((0, (3, 1.2)), (0, (8, 3)), (0, (5, 1.5, 1.2, 1.5, 1.2, 1.5)), (0, (2, 2.5))),
)
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "p")


@dataclass(frozen=True)
class Style:
    """Colours and sizes of a picture."""

    palette: Sequence[str]
    ink: str
    muted: str
    grid: str
    background: str
    font: float
    width: float
    """Of a single picture, in inches."""

    def of(self, index: int) -> str:
        """A method's colour."""
        return self.palette[index % len(self.palette)]

    def settings(self, salt: str) -> dict[Any, Any]:
        """Matplotlib's settings; the salt makes the names in an SVG its own."""
        return {
            "font.size": self.font,
            "axes.labelsize": self.font,
            "axes.titlesize": self.font,
            "xtick.labelsize": self.font * 0.92,
            "ytick.labelsize": self.font * 0.92,
            "text.color": self.ink,
            "axes.labelcolor": self.ink,
            "axes.edgecolor": self.muted,
            "xtick.color": self.muted,
            "ytick.color": self.muted,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.7,
            "xtick.major.width": 0.7,
            "ytick.major.width": 0.7,
            "xtick.minor.size": 0,
            "ytick.minor.size": 0,
            "axes.grid": True,
            "grid.color": self.grid,
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "lines.linewidth": self.font / 7.5,
            "pdf.fonttype": 42,  # fonts that a publisher's tools can read
            "svg.hashsalt": salt,
            "axes.facecolor": "none",
        }


TEXT_WIDTH = 5.5
"""Of the paper, in inches."""
PAPER = Style(PALETTE, "#16191c", "#4a5258", "#dfe3e6", "#ffffff", 8.0, TEXT_WIDTH / 2)

_VARIABLES = {
    **{f"#0100{i:02x}": f"var(--c{i})" for i in range(len(PALETTE))},
    "#020001": "var(--ink)",
    "#020002": "var(--muted)",
    "#020003": "var(--grid)",
    "#020004": "var(--card)",
}
PAGE = Style(
    tuple(_VARIABLES)[: len(PALETTE)], "#020001", "#020002", "#020003", "#020004", 11.5, 5.6
)
"""Colours that stand for variables of page.css."""


def wrapped(label: str) -> str:
    """A method's label on two lines where it says more than the method.

    Example:
        >>> wrapped("saf (weight 0.5)")
        'saf\\n(weight 0.5)'
    """
    return label.replace(" (", "\n(", 1)


def with_variables(svg: str) -> str:
    """An SVG drawn in the page's style, with the variables that its colours stand for."""
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg
