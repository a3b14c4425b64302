import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharpness_problems import matrix_of

from saltflat.sharpness.lanczos import lanczos, quadrature, top_eigenpairs


@given(
    values=st.lists(st.integers(-1000, 1000), min_size=2, max_size=40, unique=True),
    count=st.integers(1, 4),
    seed=st.integers(0, 20),
)
def test_eigenvalues_of_any_symmetric_matrix(values, count, seed):
    count = min(count, len(values))
    _, products, draw = matrix_of(values, seed)
    found, residuals, small = top_eigenpairs(products, draw, count, 1e-9, len(values))
    assert small
    assert found == pytest.approx(sorted(values, reverse=True)[:count], abs=1e-5)
    # However early it stops, an eigenvalue is as near as the residual says.
    rough, residuals, _ = top_eigenpairs(products, draw, 1, 1e-9, max(1, len(values) // 3))
    nearest = np.abs(np.array(values) - rough[0]).min()
    assert nearest <= residuals[0] + 1e-9 and rough[0] <= max(values) + 1e-9


@pytest.mark.parametrize(
    "values", [[0.0] * 6, [3.0] * 6, [5.0, 5.0, 1.0, 0.0, 0.0, 0.0], [2.0]], ids=str
)
def test_few_distinct_eigenvalues_are_no_trap(values):
    _, products, draw = matrix_of(values)
    found, residuals, small = top_eigenpairs(products, draw, 1, 1e-6, 100)
    assert found == pytest.approx([max(values)], abs=1e-12)
    assert small and residuals == pytest.approx([0.0], abs=1e-12)
    count = len(values)
    found, _, small = top_eigenpairs(products, draw, count, 1e-6, 100)
    assert found == pytest.approx(values, abs=1e-12) and small


def test_the_basis_stays_orthonormal_where_plain_lanczos_loses_it():
    values = np.concatenate([[1e4, 5e3, 1e3], np.linspace(0, 1, 197)])
    _, products, draw = matrix_of(values)
    *_, (matrix, _, basis) = lanczos(products, draw, 120, restart=False)
    rows = torch.stack(basis)
    torch.testing.assert_close(rows @ rows.T, torch.eye(120, dtype=torch.float64))
    torch.testing.assert_close(products(rows) @ rows.T, torch.from_numpy(matrix), atol=1e-9, rtol=0)


@given(
    values=st.lists(st.floats(-10, 10), min_size=2, max_size=20),
    steps=st.integers(1, 20),
    seed=st.integers(0, 5),
)
def test_the_quadrature_knows_the_moments(values, steps, seed):
    """k steps give v A^p v for p up to 2 k - 1."""
    matrix, products, draw = matrix_of(values, seed)
    vector = draw()
    vector = vector / vector.norm()
    nodes, weights = quadrature(products, lambda: vector, steps)
    assert weights.sum() == pytest.approx(1)
    power = vector
    for degree in range(min(2 * steps, 6)):
        moment = (power @ vector).item()
        assert nodes**degree @ weights == pytest.approx(moment, rel=1e-6, abs=1e-6 * 10**degree)
        power = power @ matrix
