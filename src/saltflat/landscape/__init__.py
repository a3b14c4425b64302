"""The loss on lines and planes through trained weights."""

from saltflat.landscape.directions import (
    Directions,
    line_between,
    random_directions,
    trajectory_plane,
)
from saltflat.landscape.surface import Surface, loss_surface

__all__ = [
    "Directions",
    "Surface",
    "line_between",
    "loss_surface",
    "random_directions",
    "trajectory_plane",
]
