import numpy as np
import pytest
import torch

from saltflat.core.checks import real_number, whole_number


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3)])
def test_whole_numbers(value):
    number = whole_number("lag", value, 1)
    assert (number, type(number)) == (3, int)


@pytest.mark.parametrize("value", [0, True, 3.0, "3", None, 2**31])
def test_what_is_no_whole_number_in_the_range(value):
    with pytest.raises(ValueError, match=rf"lag.*from 1 to 2147483647, got {value!r}"):
        whole_number("lag", value, 1)


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.float64(1), np.int32(1)])
def test_real_numbers(value):
    number = real_number("weight", value)
    assert (number, type(number)) == (1.0, float)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "1", None, True, [1.0]])
def test_what_is_no_real_number_in_the_range(value):
    with pytest.raises(ValueError, match=r"weight.*at least 0, got"):
        real_number("weight", value)


def test_bounds_of_real_numbers():
    with pytest.raises(ValueError, match=r"t.*above 0, got 0"):
        real_number("t", 0, above=True)
    with pytest.raises(ValueError, match=r"t.*at most 1, got 2"):
        real_number("t", 2, most=1)
    assert real_number("t", 1, 1, 1) == 1.0
