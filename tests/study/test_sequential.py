"""The confidence sequence errs rarely enough however often one looks, and says how long it will take."""

import math

import numpy as np
import pytest

from chipwise.study.referee.sequential import FEWEST, PRIOR, interval, pairs_needed


def evidence(values, mean=0.0):
    """The martingale's value, at most 1 in expectation if `mean` is the true one; 1 / error refutes it."""
    n, total = len(values), math.fsum(x - mean for x in values)
    squares = math.fsum((x - mean) ** 2 for x in values)
    if n < 2 or squares == 0:
        return 1.0
    left = max(squares - total**2 / (n + PRIOR), 0.0)
    logarithm = (math.log(PRIOR / (n + PRIOR)) + n * (math.log(squares) - math.log(left))) / 2
    return math.exp(min(logarithm, 700.0))


@pytest.mark.parametrize("n", [2, 3, 4, 17])
@pytest.mark.parametrize("error", [0.05, 0.001])
def test_the_interval_has_the_means_that_the_evidence_does_not_refute(n, error):
    values = list(np.random.default_rng(n).normal(0.3, 1, n))
    low, high = interval(values, error)
    if math.isinf(high):
        assert all(evidence(values, mean) < 1 / error for mean in (-1e6, 0, 1e6))
        return
    for edge in (low, high):
        assert evidence(values, edge) == pytest.approx(1 / error, rel=1e-6)
    assert evidence(values, (low + high) / 2) < 1 / error < evidence(values, high + (high - low))


def test_too_few_values_say_nothing():
    assert interval([], 0.05) == interval([1.0], 0.05) == (-math.inf, math.inf)
    assert math.isinf(interval(list(range(FEWEST - 1)), 0.05)[1])
    assert math.isfinite(interval(list(range(FEWEST)), 0.05)[1])
    assert evidence([1.0]) == evidence([0.0, 0.0, 0.0]) == 1


def test_values_without_a_spread():
    assert interval([0.0] * 5, 0.05) == (0, 0) and interval([2.0] * 5, 0.05) == (2, 2)
    assert 1 < evidence([2.0] * 5) < math.inf


def test_the_mean_of_a_metric_in_steps_is_held_although_values_are_alike():
    """Four pairs that differ by one example each do not say that all pairs do."""
    low, high = interval([1.0] * 4, 0.05, 1.0)
    assert low < 0.5 and high > 1.5 and pairs_needed([1.0] * 4, None, 0.05, 1.0) > 4
    draws, wrong = np.random.default_rng(0).binomial(1, 0.2, (300, 40)) + 1.0, [0, 0]
    for row in draws:
        for at, grain in enumerate((0.0, 1.0)):
            intervals = [interval(row[:n], 0.05, grain) for n in range(FEWEST, 41)]
            wrong[at] += any(low > 1.2 or high < 1.2 for low, high in intervals)
    assert wrong[0] > 0.2 * 300 and wrong[1] <= 0.05 * 300


def test_at_most_five_percent_of_nulls_are_refuted_at_any_of_forty_looks():
    """A reduced `benchmarks/referee.py`."""
    draws, wrong = np.random.default_rng(0).normal(0, 1, (200, 40)), 0
    for row in draws:
        intervals = (interval(row[:n], 0.05) for n in range(FEWEST, 41))
        wrong += any(low > 0 or high < 0 for low, high in intervals)
    assert wrong <= 0.05 * 200


def test_what_a_verdict_takes():
    values = [0.9, 1.1, 1.3, 0.7]
    needed = pairs_needed(values, None, 0.05)
    assert needed == FEWEST and interval(values, 0.05)[0] > 0
    wide = [3.0, -1.0, 2.0, 0.0]
    needed = pairs_needed(wide, None, 0.05)
    assert needed > len(wide)
    repeated = (wide * needed)[:needed]
    assert (
        interval([x * math.sqrt(3 / 4) for x in repeated], 0.05)[0] > -1
    )  # about the width that is predicted
    assert pairs_needed([1.0], None, 0.05) is None and pairs_needed([1.0, -1.0], None, 0.05) is None
    assert pairs_needed([1.0, -1.0], 0.5, 0.05) > pairs_needed([1.0, -1.0], 2.0, 0.05)
