"""Sharpness-aware training for free: SAF and MESA in three lines of any PyTorch loop."""

# the loss
from saltflat.trajectory import trajectory_loss

# the paper's two methods
from saltflat.saf import SAF
from saltflat.mesa import MESA

# what they are compared with
from saltflat import sam

# what they are made of
from saltflat.memory import OutputMemory
from saltflat.teacher import EMATeacher, decay_for_half_life

# data that carries its index, and stays where its outputs are
from saltflat.indexed import with_index
from saltflat.sampler import StickySampler

__version__ = "0.1.0"

__all__ = [
    "MESA",
    "SAF",
    "EMATeacher",
    "OutputMemory",
    "StickySampler",
    "decay_for_half_life",
    "sam",
    "trajectory_loss",
    "with_index",
]
