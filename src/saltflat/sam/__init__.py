"""The SAM family: what SAF and MESA are compared with, as wrappers around any optimizer."""

# two passes a step
from saltflat.sam.sam import SAM
from saltflat.sam.asam import ASAM
from saltflat.sam.gsam import GSAM

# fewer
from saltflat.sam.esam import ESAM
from saltflat.sam.looksam import LookSAM
from saltflat.sam.msam import MSAM

__all__ = ["ASAM", "ESAM", "GSAM", "MSAM", "SAM", "LookSAM"]
