"""Hutch++: the trace of a symmetric matrix that is known only by its products with vectors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saltflat.sharpness.lanczos import Products


def hutchpp(products: Products, signs: Callable[[int], Tensor], hvps: int) -> list[float]:
    r"""Independent estimates of the trace, of which the mean is Hutch++'s.

    .. math:: \operatorname{tr}(Q^T A Q) + \frac{1}{k} \sum_{i=1}^{k} r_i^T A r_i, \qquad
        r_i = (I - Q Q^T) s_i

    A third of the products finds a basis Q of the large eigenvalues. A third takes the trace there
    exactly, and a third samples the rest with random signs s.

    Args:
        products: The matrix.
        signs: Returns the given number of rows of random signs.
        hvps: Products to spend, a multiple of three.

    References:
        Meyer, Musco, Musco and Woodruff, Hutch++: Optimal Stochastic Trace Estimation, SOSA 2021.
    """
    third = hvps // 3
    basis = torch.linalg.qr(products(signs(third)).T).Q.T
    rest = signs(third)
    rest = rest - (rest @ basis.T) @ basis
    both = torch.cat([basis, rest])
    traces = (both * products(both)).sum(1).double()
    return (traces[: len(basis)].sum() + traces[len(basis) :]).tolist()
