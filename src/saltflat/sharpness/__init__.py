"""How flat a minimum is."""

from saltflat.sharpness.neighbourhood import sam_sharpness

__all__ = ["sam_sharpness"]
