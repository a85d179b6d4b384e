"""Reading a curve, as pure functions of arrays."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chipwise.base.facts import fact
from chipwise.study.range_test import read, smooth

RATES = np.geomspace(1e-5, 10.0, 100)
MARKS = ("suggestion", "last_stable")
ANY = st.floats(width=32, allow_nan=False, allow_infinity=False)


def hill(rates=RATES):
    """Flat at 2, falls between 1e-3 and 1e-2 to 0.5, flat to 1, then breaks away."""
    decades = np.log10(rates)
    return np.interp(decades, [-5, -3, -2, 0, 1], [2.0, 2.0, 0.5, 0.5, 50.0])


def codes(curve):
    return [doubt.code for doubt in curve.doubts if str(doubt)]


def test_the_marks_of_a_plain_curve():
    curve = read(RATES, hill())
    assert 0.5 < curve.last_stable < 1.5
    assert 0.03 < curve.suggestion < 0.3  # the middle of 1e-2 to 1
    assert curve.doubts == ()


def test_a_curve_that_never_breaks_says_so():
    curve = read(RATES, np.minimum(hill(), 2.0 - 1.5 * (RATES > 1e-2)))
    assert curve.last_stable == RATES[-1] and curve.doubts == (fact("loss-held-to-the-end", lr=10.0),)
    assert curve.suggestion < curve.last_stable


def test_a_sweep_that_was_stopped_is_not_asked_to_go_further():
    curve = read(RATES, np.minimum(hill(), 2.0 - 1.5 * (RATES > 1e-2))[:61])
    assert curve.last_stable == RATES[60] and curve.doubts == () and curve.fell


@pytest.mark.parametrize("losses", [np.full(100, 2.3), np.linspace(2.0, 9.0, 100), [1.0], [1.0, 2.0]])
def test_a_curve_that_never_falls_is_doubtful(losses):
    curve = read(RATES, np.asarray(losses))
    assert (
        codes(curve) == ["loss-never-fell"] and not curve.fell and RATES[0] <= curve.suggestion <= RATES[-1]
    )


def test_a_curve_that_falls_at_once_is_doubtful():
    rates = RATES[RATES > 2e-3]
    assert "loss-fell-at-once" in codes(read(rates, hill(rates)))


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(ANY, min_size=1, max_size=60))
@example([-3.0, -1e30, 1e30])
@example([0.0] * 20)
def test_any_mixture_gives_finite_marks_inside_the_range(losses):
    curve = read(RATES, np.asarray(losses, np.float64))
    assert len(curve.rates) == len(curve.losses) == len(curve.smoothed) == len(losses)
    assert np.isfinite(curve.smoothed).all()
    for mark in MARKS:
        rate = getattr(curve, mark)
        assert math.isfinite(rate) and RATES[0] <= rate <= RATES[len(losses) - 1], mark
    assert curve.suggestion <= curve.last_stable


@given(
    noise=st.lists(st.floats(-0.05, 0.05), min_size=100, max_size=100),
    size=st.sampled_from([2.0**-20, 0.25, 8.0, 2.0**20]),
    shift=st.sampled_from([0.0, 1.0, 16.0]),
    faster=st.sampled_from([1e-3, 0.5, 30.0]),
)
@settings(max_examples=40)
def test_units_of_loss_and_rate_have_no_part(noise, size, shift, faster):
    """The losses lie on a grid of powers of two, so that the arithmetic below is exact."""
    losses = np.round((np.minimum(hill(), 3.0) + np.asarray(noise)) * 1024) / 1024
    one, other = read(RATES, losses), read(RATES * faster, (losses + shift) * size)
    for mark in ("suggestion", "last_stable"):
        assert getattr(other, mark) == pytest.approx(faster * getattr(one, mark), rel=0.2), mark
    same = read(RATES, losses * size)
    assert [getattr(same, mark) for mark in MARKS] == pytest.approx([getattr(one, mark) for mark in MARKS])


def test_smoothing_keeps_constants_and_slopes_and_hides_no_start():
    np.testing.assert_allclose(smooth(RATES, np.full(100, 7.0)), 7.0)
    slope = smooth(RATES, np.linspace(0.0, -1.0, 100))
    np.testing.assert_allclose(slope[20:80], np.linspace(0.0, -1.0, 100)[20:80], atol=1e-3)  # it does not lag
    noisy = np.random.default_rng(0).normal(2.0, 0.2, 100)
    assert smooth(RATES, noisy).std() < 0.5 * noisy.std()


def test_an_explosion_at_the_end_does_not_reach_back():
    calm = hill()[:70]
    curve = read(RATES, np.append(calm, 1e30))
    np.testing.assert_allclose(curve.smoothed[:60], smooth(RATES[:70], calm)[:60], atol=0.01)
