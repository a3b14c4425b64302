"""Trajectory terms: what is added to a loss, one method a file."""

from saltflat.terms.base import Batch, TrajectoryTerm
from saltflat.terms.divergence import trajectory_loss
from saltflat.terms.saf import SAF
from saltflat.terms.mesa import MESA
from saltflat.terms.controls import Shuffled, Uniform

__all__ = ["MESA", "SAF", "Batch", "Shuffled", "TrajectoryTerm", "Uniform", "trajectory_loss"]
