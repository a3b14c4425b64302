"""The SAM family: what SAF and MESA are compared with, as wrappers around any optimizer."""

# two passes a step
from saltflat.sam.asam import ASAM

# fewer
from saltflat.sam.esam import ESAM
from saltflat.sam.gsam import GSAM
from saltflat.sam.looksam import LookSAM
from saltflat.sam.msam import MSAM
from saltflat.sam.sam import SAM

__all__ = ["ASAM", "ESAM", "GSAM", "MSAM", "SAM", "LookSAM"]
