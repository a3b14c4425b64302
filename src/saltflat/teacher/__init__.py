"""The moving average of a model's weights: its update, and a cheaper, better scaled reference."""

from saltflat.teacher.ema import EMATeacher, decay_for_half_life
from saltflat.teacher.fold import FoldedTwin
from saltflat.teacher.rescale import scale_factor

__all__ = ["EMATeacher", "FoldedTwin", "decay_for_half_life", "scale_factor"]
