"""Pictures of measurements; all that needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("pictures need: pip install 'saltflat[report]'") from error


def accuracy_speed(rows: Sequence[Mapping[str, Any]], path: Path) -> Figure:
    """Accuracy against speed, as in the paper's figure 1: up and to the right is better.

    Args:
        rows: Of each method its "method", "accuracy" in percent and "images_per_second".
        path: Where the picture goes, as .svg and as .png.

    Returns:
        The picture.
    """
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        point = row["images_per_second"], row["accuracy"]
        axes.scatter(*point)
        axes.annotate(row["method"], point, (0, 6), textcoords="offset points", ha="center")
    axes.margins(0.15)  # room for the names
    axes.set_xlim(left=0)  # so that twice as far is twice as fast
    axes.set_xlabel("images/s")
    axes.set_ylabel("accuracy, %")
    axes.grid(alpha=0.3)
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=200)
    return figure
