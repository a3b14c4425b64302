"""Lanczos' iteration for a symmetric matrix that is known only by its products with vectors.

Written here because it stops at the residual that the result states. On a CPU curvlinops took 1.9
to 3.4 times as long for the top eigenvalue (`benchmarks/hessian.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

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
    """Iterate with full reorthogonalisation.

    Args:
        products: The matrix.
        draw: Returns a random vector.
        steps: Stop after this number of steps, or after one for each row of the matrix.
        restart: Whether to continue with a new random vector when the Krylov space is exhausted.
            That happens if the matrix has few distinct eigenvalues.

    Yields:
        After each step the tridiagonal matrix, the norm of the next vector before it is
        normalised, and the orthonormal basis. The norm predicts the residuals.

    Raises:
        ValueError: If a product is not finite.
    """
    basis: list[Tensor] = []
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    vector = draw()
    steps = min(steps, len(vector))
    vector = vector / vector.norm()
    while True:
        basis.append(vector)
        product = products(vector[None])[0]
        # One transfer a step: the next step depends on both numbers.
        alpha, beta = torch.stack([product @ vector, _orthogonalise_(product, basis)]).tolist()
        if not math.isfinite(alpha + beta):
            raise ValueError(
                "the second derivatives of the loss are not finite: the run has diverged, or the "
                "loss is not smooth at these weights"
            )
        diagonal.append(alpha)
        matrix = np.diag(diagonal) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1)
        scale = max(np.abs(matrix).sum(1).max(), beta)
        exhausted = not beta > 100 * torch.finfo(product.dtype).eps * scale
        yield matrix, 0.0 if exhausted else beta, basis
        if len(basis) == steps or (exhausted and not restart):
            return
        if exhausted:
            product = draw()
            off_diagonal.append(0.0)
            vector = product / _orthogonalise_(product, basis)
        else:
            off_diagonal.append(beta)
            vector = product / beta


def _orthogonalise_(vector: Tensor, basis: list[Tensor]) -> Tensor:
    """Subtract the projection on the basis in place, twice; return the norm of the rest."""
    for _ in range(2):
        for known in basis:
            vector.sub_(known * (known @ vector))
    return vector.norm()


def top_eigenpairs(
    products: Products, draw: Callable[[], Tensor], count: int, tolerance: float, steps: int
) -> tuple[list[float], list[float], bool]:
    """The largest eigenvalues in falling order, their residuals, and whether they converged.

    They have converged if no residual exceeds the tolerance times the largest |eigenvalue|. The
    residuals are measured, by `count` more products, and not those that the iteration predicts.
    """
    for matrix, beta, basis in lanczos(products, draw, steps, restart=True):
        values, vectors = np.linalg.eigh(matrix)
        enough = len(values) >= min(count, len(basis[0]))
        largest = np.abs(values).max()
        if enough and (beta * np.abs(vectors[-1, -count:])).max() <= tolerance * largest:
            break
    coefficients = torch.tensor(vectors[:, -count:], dtype=basis[0].dtype, device=basis[0].device)
    ritz = torch.zeros_like(basis[0]).repeat(coefficients.shape[1], 1)
    for row, vector in zip(coefficients, basis, strict=True):
        ritz += row[:, None] * vector
    ritz /= ritz.norm(dim=1, keepdim=True)
    images = products(ritz)
    quotients = (ritz * images).sum(1)
    norms = (images - quotients[:, None] * ritz).norm(dim=1)
    eigenvalues, residuals = torch.stack([quotients, norms]).tolist()
    order = np.argsort(eigenvalues)[::-1]
    converged = bool(np.max(residuals) <= tolerance * largest)
    return [eigenvalues[i] for i in order], [residuals[i] for i in order], converged


def quadrature(products: Products, draw: Callable[[], Tensor], steps: int) -> tuple[Array, Array]:
    """Nodes and weights: f(nodes) @ weights approximates v^T f(A) v for a random unit vector v."""
    *_, (matrix, _, _) = lanczos(products, draw, steps, restart=False)
    values, vectors = np.linalg.eigh(matrix)
    return values, vectors[0] ** 2
