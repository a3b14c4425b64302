"""Sharpness-aware training for free: SAF and MESA in three lines of any PyTorch loop."""

# The two methods of the paper, and what a method of your own builds on.
from saltflat.terms import MESA, SAF, Batch, TrajectoryTerm, trajectory_loss

# Datasets and loaders whose samples carry their index.
from saltflat.memory import indexed_loader, split_index, with_index, with_index_column

# The moving average of a model.
from saltflat.teacher import EMATeacher, decay_for_half_life

# A training step as a CUDA graph.
from saltflat.core.cuda_graph import GraphedStep

# The SAM family, to compare with.
from saltflat import sam

__version__ = "0.1.0"

__all__ = [
    "MESA",
    "SAF",
    "Batch",
    "EMATeacher",
    "GraphedStep",
    "TrajectoryTerm",
    "decay_for_half_life",
    "indexed_loader",
    "sam",
    "split_index",
    "trajectory_loss",
    "with_index",
    "with_index_column",
]
