"""The moving average of a model's weights, and what makes its forward pass cheaper."""

from saltflat.teacher.ema import EMATeacher, decay_for_half_life
from saltflat.teacher.fold import FoldedTwin

__all__ = ["EMATeacher", "FoldedTwin", "decay_for_half_life"]
