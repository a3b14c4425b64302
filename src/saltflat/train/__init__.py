"""The runner: the paper's experiments, and anyone's own, as a function of a config."""

from saltflat.train.config import Config, DataConfig, MethodConfig, OptimizerConfig
from saltflat.train.loop import Interrupted, Run, fit

__all__ = [
    "Config",
    "DataConfig",
    "Interrupted",
    "MethodConfig",
    "OptimizerConfig",
    "Run",
    "fit",
]
