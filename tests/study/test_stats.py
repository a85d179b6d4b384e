"""Intervals and verdicts, against SciPy's own tests and against what they promise."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from chipwise.study.stats import (
    HIGHER,
    LOWER,
    NO_DIFFERENCE,
    TWO_ALIKE,
    UNKNOWN,
    Spread,
    _t,
    difference,
    paired,
    ratio,
)

NUMBERS = st.floats(-1e6, 1e6).map(lambda x: round(x, 3))
LISTS = st.lists(NUMBERS, min_size=2, max_size=8)


def close(a, b):
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-6)


@given(LISTS)
def test_the_interval_of_a_mean_is_students(values):
    spread = Spread.of(values)
    error = stats.sem(values)
    low, high = (
        stats.t.interval(0.95, len(values) - 1, np.mean(values), error) if error else (np.mean(values),) * 2
    )
    assert spread.n == len(values) and close(spread.mean, np.mean(values))
    assert close(spread.deviation, np.std(values, ddof=1))
    assert close(spread.low, low) and close(spread.high, high)


@given(LISTS, LISTS)
def test_a_difference_is_welchs(a, b):
    assume(np.ptp(a) > 1 and np.ptp(b) > 1)  # SciPy warns of equal values
    found = difference(a, b)
    interval = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert close(found.low, interval.low) and close(found.high, interval.high)
    assert found.verdict == (LOWER if found.high < 0 else HIGHER if found.low > 0 else NO_DIFFERENCE)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=8))
def test_pairs_are_the_paired_test(pairs):
    a, b = zip(*pairs, strict=True)
    found = paired(a, b)
    alone = Spread.of([x - y for x, y in pairs])
    if found.verdict == TWO_ALIKE:
        assert len(pairs) == 2 and found.low is None and close(alone.deviation, 0)
        return
    assert close(found.low, alone.low) and close(found.high, alone.high)
    mirrored = paired(b, a)
    assert close(found.value, -mirrored.value)
    assert {found.verdict, mirrored.verdict} in ({HIGHER, LOWER}, {NO_DIFFERENCE})


def test_one_value_has_no_interval():
    assert Spread.of([3.0]) == Spread(1, 3.0, None, None, None)
    assert difference([3.0], [1.0]).verdict == UNKNOWN
    assert paired([3.0], [1.0]).verdict == UNKNOWN
    assert ratio([3.0], [1.0]).verdict == UNKNOWN


def test_one_value_against_several_is_judged_by_the_spread_of_these():
    several = [1.0, 1.1, 0.9, 1.05, 0.95]
    assert difference([1.02], several).verdict == NO_DIFFERENCE
    assert difference([2.0], several).verdict == HIGHER
    assert difference(several, [2.0]).verdict == LOWER
    # A further value must lie within the prediction interval: t * deviation * sqrt(1 + 1/n)
    half = stats.t.ppf(0.975, 4) * np.std(several, ddof=1) * math.sqrt(1 + 1 / 5)
    found = difference([1.0], several)
    assert close(found.high - found.value, half)


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_a_ratio_knows_no_unit_and_turns_over(values, factor):
    b = [2.0, 2.1]
    here, scaled = ratio(values, b), ratio([x * factor for x in values], [x * factor for x in b])
    assert math.isclose(here.value, scaled.value, rel_tol=1e-9)
    assert math.isclose(here.value * ratio(b, values).value, 1, rel_tol=1e-9)
    assert math.isclose(here.low * ratio(b, values).high, 1, rel_tol=1e-6)


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.inf]])
def test_what_is_no_measurement_is_refused(values):
    for function in (Spread.of, lambda v: difference(v, [1.0]), lambda v: difference([1.0], v)):
        with pytest.raises(ValueError, match="expected finite numbers, at least one"):
            function(values)


def test_ratios_need_numbers_above_zero():
    with pytest.raises(ValueError, match="above 0"):
        ratio([1.0], [0.0])


def test_pairs_must_be_pairs():
    with pytest.raises(ValueError):
        paired([1.0, 2.0], [1.0])


@pytest.mark.parametrize("freedom", [1.0, 1.5, 2.0, 3.7, 10.0, 100.0, 1e5])
def test_the_quantile_is_students(freedom):
    assert math.isclose(_t(freedom), stats.t.ppf(0.975, freedom), rel_tol=1e-10)


def test_two_that_agree_show_nothing():
    """Accuracies are multiples of a few hundredths of a percent: two differences are easily the same."""
    for a, b in (([0.9, 0.7], [0.8, 0.6]), ([0.9, 0.9], [0.8, 0.8])):
        assert paired(a, b).verdict == paired(b, a).verdict == TWO_ALIKE
    assert difference([0.9, 0.9], [0.8, 0.8]).verdict == TWO_ALIKE
    assert paired([0.9, 0.7, 0.8], [0.8, 0.6, 0.7]).verdict == HIGHER
    assert paired([0.9, 0.7], [0.9, 0.7]).verdict == NO_DIFFERENCE


def test_the_interval_of_a_share_ends_at_0_and_1():
    near = Spread.of([0.99, 1.0, 0.9], "eval/accuracy")
    assert near.low < 0.9 and near.high == 1.0
    assert Spread.of([0.01, 0.0, 0.1], "eval/f1").low == 0.0
    assert Spread.of([0.99, 1.0, 0.9], "eval/loss").high > 1
    assert Spread.of([99.0, 100.0, 90.0], "eval/accuracy").high > 100  # percent
