"""How flat a minimum is: the rise of the loss around it, and its Hessian."""

# the rise of the loss near the weights
from saltflat.sharpness.neighbourhood import sam_sharpness, max_sharpness, m_sharpness
from saltflat.sharpness.adaptive import adaptive_sharpness, average_sharpness

# the second derivatives at the weights
from saltflat.sharpness.hessian import top_eigenvalues, hessian_trace, spectral_density

# results and settings
from saltflat.core.statistics import Interval
from saltflat.sharpness.result import Eigenvalues, Measured, Sharpness, Spectrum, Trace
from saltflat.sharpness.objective import Policy

__all__ = [
    "Eigenvalues",
    "Interval",
    "Measured",
    "Policy",
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
