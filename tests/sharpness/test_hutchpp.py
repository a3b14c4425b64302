import numpy as np
import pytest
from sharpness_problems import matrix_of, signs_of

from saltflat.core.statistics import interval
from saltflat.sharpness.hutchpp import hutchpp


def test_the_traces_interval_holds_the_trace_as_often_as_it_says():
    """95 % of the time, on a matrix with a large eigenvalue and a long tail."""
    values = np.concatenate([[50.0, 20.0], 1 / np.arange(1, 119) ** 0.5])
    matrix, products, _ = matrix_of(values)
    truth, found, plain = values.sum(), [], []
    for seed in range(600):
        estimate = interval(hutchpp(products, signs_of(120, seed), 30))
        assert estimate.n == 10
        found.append((estimate.mean, estimate.low <= truth <= estimate.high))
        rows = signs_of(120, seed)(30)
        plain.append(((rows @ matrix) * rows).sum(1).mean().item())
    values_found, covered = (np.array(column) for column in zip(*found, strict=True))
    assert 0.93 <= covered.mean() <= 0.97
    assert values_found.mean() == pytest.approx(truth, abs=4 * values_found.std() / 600**0.5)
    assert values_found.std() < 0.5 * np.std(plain)  # Hutchinson's, with as many products
