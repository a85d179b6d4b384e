"""Round numbers along an axis: few, within it, in order."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from chipwise.explain.page.axes import log_steps, spread_out, steps


@given(low=st.floats(-1e30, 1e30), span=st.floats(1e-6, 1e30), most=st.integers(3, 6))
def test_steps(low, span, most):
    found = steps(low, low + span, most)
    assert len(found) <= most + 1 and all(a <= b for a, b in itertools.pairwise(found))
    if span > abs(low) * 1e-6:
        assert all(low - 1e-6 * span <= x <= low + span * (1 + 1e-6) for x in found)


def test_steps_are_round():
    assert steps(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert steps(3.1, 9.9, 3) == [5]
    assert steps(7, 7, 5) == [7]


@given(low=st.floats(1e-12, 1e12), decades=st.floats(0, 12), most=st.integers(3, 8))
def test_log_steps(low, decades, most):
    high = low * 10**decades
    found = log_steps(low, high, most)
    assert len(found) <= most and found == sorted(found) and all(low <= x <= high for x in found)
    assert found or decades < math.log10(3)


def test_log_steps_are_round():
    assert log_steps(1, 100, 6) == [1, 3, 10, 30, 100]
    assert log_steps(1, 100, 8) == [1, 2, 5, 10, 20, 50, 100]


def test_what_is_spread_out():
    assert spread_out([1, 41], 40) and not spread_out([1, 40], 40)
    assert not spread_out([0, 41], 40) and not spread_out([-1, 41], 40) and not spread_out([], 40)
    assert not spread_out([1e-300, 1e10], 40)
