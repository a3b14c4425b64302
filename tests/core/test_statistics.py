import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp, ttest_rel

from saltflat.core.statistics import Interval, half_width, interval, paired, verdict

ACCURACY = st.floats(0, 100).map(lambda x: round(x, 2))
PAIRS = st.lists(st.tuples(ACCURACY, ACCURACY), min_size=2, max_size=10)


@given(PAIRS)
def test_the_paired_interval_is_scipys(pairs):
    values, base = map(list, zip(*pairs, strict=True))
    assume(len({round(a - b, 2) for a, b in pairs}) > 1)
    expected = ttest_rel(values, base).confidence_interval(0.95)
    ours = paired(values, base)
    assert ours.n == len(pairs)
    assert ours.low == pytest.approx(expected.low, abs=1e-9)
    assert ours.high == pytest.approx(expected.high, abs=1e-9)
    assert ours.mean == pytest.approx((expected.low + expected.high) / 2, abs=1e-9)


@given(PAIRS)
def test_the_verdict_is_the_tests_at_5_percent(pairs):
    values, base = map(list, zip(*pairs, strict=True))
    assume(len({round(a - b, 2) for a, b in pairs}) > 1)
    test = ttest_rel(values, base)
    assume(abs(test.pvalue - 0.05) > 1e-9)
    sentence = verdict("saf", "base", paired(values, base))
    if test.pvalue > 0.05:
        assert sentence.startswith("saf: no evidence of a difference to base (")
    else:
        assert sentence.startswith(f"saf: {'better' if test.statistic > 0 else 'worse'} than base")


def test_one_group_is_scipys_too():
    values = [91.2, 90.7, 92.0, 91.1]
    expected = ttest_1samp(values, 0).confidence_interval(0.95)
    assert interval(values).low == pytest.approx(expected.low)
    assert interval(values).high == pytest.approx(expected.high)


def test_pairs_matter_where_seeds_differ_more_than_methods():
    base = [60.0, 70.0, 80.0]
    values = [61.0, 71.1, 80.9]
    assert paired(values, base).low > 0
    assert interval(values).low < interval(base).high


def test_a_single_seed_says_nothing():
    single = paired([91.0], [80.0])
    assert single == Interval(11.0, math.nan, math.nan, 1)
    assert str(single) == "11.00 (n = 1)"
    sentence = verdict("sam", "base", single)
    assert "+11.00 points, n = 1" in sentence and "inf" not in sentence and "nan" not in sentence


def test_no_value_has_no_mean():
    with pytest.raises(ValueError, match=r"values.*got \[\]"):
        interval([])


@pytest.mark.parametrize("n", [2, 3, 4, 5, 10, 11, 100, 101])
def test_half_widths_are_scipys_over_the_first_axis(n):
    draws = np.random.default_rng(n).normal(size=(n, 3))
    expected = ttest_1samp(draws, 0).confidence_interval(0.95)
    assert 2 * half_width(draws) == pytest.approx(expected.high - expected.low)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_has_no_interval(value):
    found = interval([1.0, value, 2.0])
    assert np.isnan([found.mean, found.low, found.high]).all() and found.n == 3


def test_seeds_must_be_the_same():
    with pytest.raises(ValueError, match="longer than"):
        paired([1.0, 2.0], [1.0, 2.0, 3.0])


def test_sentences():
    assert verdict("sam", "base", Interval(0.5, 0.25, 0.75, 3)) == (
        "sam: better than base (+0.50 points, 95 % interval 0.25 to 0.75, n = 3)"
    )
    assert verdict("sam", "base", Interval(-0.5, -0.75, -0.25, 3)) == (
        "sam: worse than base (-0.50 points, 95 % interval -0.75 to -0.25, n = 3)"
    )
    assert str(Interval(91.234, 90.0, 92.5, 3)) == "91.23 [90.00, 92.50]"
    assert f"{Interval(1234.5, 0.012345, 2.0, 3):.3g}" == "1.23e+03 [0.0123, 2]"


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 0.0), (float("nan"), float("nan"))])
def test_what_touches_zero_is_no_evidence(low, high):
    assert "no evidence" in verdict("sam", "base", Interval((low + high) / 2, low, high, 3))
