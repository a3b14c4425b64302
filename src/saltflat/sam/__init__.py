"""The SAM family: wrappers around any optimizer, which SAF and MESA are compared with."""

# two passes a step
from saltflat.sam.sam import SAM
from saltflat.sam.asam import ASAM
from saltflat.sam.gsam import GSAM

# fewer passes
from saltflat.sam.esam import ESAM
from saltflat.sam.looksam import LookSAM
from saltflat.sam.msam import MSAM

__all__ = ["ASAM", "ESAM", "GSAM", "MSAM", "SAM", "LookSAM"]
