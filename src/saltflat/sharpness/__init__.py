"""How flat a minimum is."""

# the rise of the loss near the weights
from saltflat.sharpness.neighbourhood import sam_sharpness, max_sharpness, m_sharpness
from saltflat.sharpness.adaptive import adaptive_sharpness, average_sharpness

# its second derivatives there
from saltflat.sharpness.hessian import top_eigenvalues, hessian_trace, spectral_density

# what they give
from saltflat.sharpness.result import Eigenvalues, Measured, Sharpness, Spectrum, Trace

__all__ = [
    "Eigenvalues",
    "Measured",
    "Sharpness",
    "Spectrum",
    "Trace",
    "adaptive_sharpness",
    "average_sharpness",
    "hessian_trace",
    "m_sharpness",
    "max_sharpness",
    "sam_sharpness",
    "spectral_density",
    "top_eigenvalues",
]
