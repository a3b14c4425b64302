"""Symmetric matrices that are known by their products with vectors: Lanczos and Hutch++."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Products = Callable[[Tensor], Tensor]
"""From rows to the matrix times each of them."""


def lanczos(
    products: Products, draw: Callable[[], Tensor], steps: int, *, restart: bool
) -> Iterator[tuple[Array, float, list[Tensor]]]:
    """The steps of Lanczos' iteration, with full reorthogonalisation.

    Args:
        products: The matrix.
        draw: A random vector.
        steps: At most so many; never more than the matrix has rows.
        restart: Whether to go on with a new vector where the space of the first is exhausted, as
            it is by a matrix of few distinct eigenvalues.

    Yields:
        After each step the tridiagonal matrix, the length of what is left of the next vector, by
        which the residuals are known, and the orthonormal basis.
    """
    basis: list[Tensor] = []
    diagonal: list[float] = []
    beside: list[float] = []
    vector = draw()
    steps = min(steps, len(vector))
    vector = vector / vector.norm()
    while True:
        basis.append(vector)
        product = products(vector[None])[0]
        # Both numbers are needed here and now: to know whether to go on.
        alpha, beta = torch.stack([product @ vector, _remainder_(product, basis)]).tolist()
        if not math.isfinite(alpha + beta):
            raise ValueError(
                "the second derivatives of the loss are not finite: a run that has diverged, or a "
                "loss that is not smooth there"
            )
        diagonal.append(alpha)
        matrix = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        scale = max(np.abs(matrix).sum(1).max(), beta)
        exhausted = not beta > 100 * torch.finfo(product.dtype).eps * scale
        yield matrix, 0.0 if exhausted else beta, basis
        if len(basis) == steps or (exhausted and not restart):
            return
        if exhausted:
            product = draw()
            beside.append(0.0)
            vector = product / _remainder_(product, basis)
        else:
            beside.append(beta)
            vector = product / beta


def _remainder_(vector: Tensor, basis: list[Tensor]) -> Tensor:
    """Take the basis out of the vector, twice, in place, and give the length of what is left."""
    for _ in range(2):
        for known in basis:
            vector.sub_(known * (known @ vector))
    return vector.norm()


def top_pairs(
    products: Products, draw: Callable[[], Tensor], count: int, tolerance: float, steps: int
) -> tuple[list[float], list[float], bool]:
    """The largest eigenvalues in falling order, their residuals, and whether these are small.

    A residual counts as small within the tolerance times the largest |eigenvalue|. The residuals
    are measured, by `count` more products, not those that the iteration predicts.
    """
    for matrix, beta, basis in lanczos(products, draw, steps, restart=True):
        values, vectors = np.linalg.eigh(matrix)
        found = len(values) >= min(count, len(basis[0]))
        largest = np.abs(values).max()
        if found and (beta * np.abs(vectors[-1, -count:])).max() <= tolerance * largest:
            break
    shares = torch.tensor(vectors[:, -count:], dtype=basis[0].dtype, device=basis[0].device)
    ritz = torch.zeros_like(basis[0]).repeat(shares.shape[1], 1)
    for share, vector in zip(shares, basis, strict=True):
        ritz += share[:, None] * vector
    ritz /= ritz.norm(dim=1, keepdim=True)
    images = products(ritz)
    quotients = (ritz * images).sum(1)
    lengths = (images - quotients[:, None] * ritz).norm(dim=1)
    eigenvalues, residuals = torch.stack([quotients, lengths]).tolist()
    order = np.argsort(eigenvalues)[::-1]
    small = bool(np.max(residuals) <= tolerance * largest)
    return [eigenvalues[i] for i in order], [residuals[i] for i in order], small


def quadrature(products: Products, draw: Callable[[], Tensor], steps: int) -> tuple[Array, Array]:
    """Nodes and weights such that f(nodes) @ weights is near v.T f(A) v of a random unit v."""
    for matrix, _, _ in lanczos(products, draw, steps, restart=False):  # noqa: B007 - the last
        pass
    values, vectors = np.linalg.eigh(matrix)
    return values, vectors[0] ** 2


def hutchpp(products: Products, signs: Callable[[int], Tensor], hvps: int) -> tuple[float, Any]:
    """The trace, and the draws that it is the mean of.

    A third of the products finds a subspace that holds the large eigenvalues, a third takes the
    trace there exactly, and a third samples what is left of it.

    Args:
        products: The matrix.
        signs: So many rows of random signs.
        hvps: Products to spend, a multiple of three.

    References:
        Meyer, Musco, Musco and Woodruff, Hutch++: Optimal Stochastic Trace Estimation, SOSA 2021.
    """
    third = hvps // 3
    subspace = torch.linalg.qr(products(signs(third)).T).Q.T
    rest = signs(third)
    rest = rest - (rest @ subspace.T) @ subspace
    both = torch.cat([subspace, rest])
    traces = (both * products(both)).sum(1).double()
    exact, sampled = traces[: len(subspace)].sum(), traces[len(subspace) :]
    draws = (exact + sampled).tolist()
    return float(np.mean(draws)), draws
