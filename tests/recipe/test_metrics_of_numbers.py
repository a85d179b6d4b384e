"""Errors of numbers, and R2 from sums: how far its center may be from the mean."""

import jax
import numpy as np
import pytest
import sklearn.metrics as sk
from hypothesis import given, settings
from hypothesis import strategies as st

from chipwise import metrics
from chipwise.base.errors import RecipeError
from chipwise.recipe.task import Sum, finished
from refusals import refused


def value(metric):
    return finished({"metric": metric})["metric"]


@given(seed=st.integers(0, 999), shape=st.sampled_from([(9,), (4, 2, 2)]))
@settings(max_examples=15, deadline=None)
def test_of_several_values_as_scikit_learn_does(seed, shape):
    rng = np.random.default_rng(seed)
    truth = rng.normal(1, 3, shape).astype(np.float32)
    guess = (truth + rng.normal(size=shape)).astype(np.float32)
    flat = [x.astype(np.float64).reshape(shape[0], -1) for x in (truth, guess)]
    for ours, theirs in (
        (metrics.mse, sk.mean_squared_error),
        (metrics.rmse, sk.root_mean_squared_error),
        (metrics.mae, sk.mean_absolute_error),
    ):
        assert value(ours(guess, truth)) == pytest.approx(theirs(*flat), rel=1e-6)
    assert value(metrics.r2(guess, truth)) == pytest.approx(sk.r2_score(*flat), rel=1e-5, abs=1e-6)


def r2_in_parts(guess, truth, center):
    """As an evaluation adds them: float32 sums of 1024 examples, the parts in float64."""
    sums = jax.jit(lambda p, t: metrics.r2(p, t, center))
    parts = [sums(guess[i : i + 1024], truth[i : i + 1024]) for i in range(0, len(truth), 1024)]
    total, count = (sum(np.asarray(x, np.float64) for x in xs) for xs in zip(*map(jax.tree.leaves, parts)))  # noqa: B905
    return value(Sum(total, count, parts[0].finish))


@pytest.mark.parametrize(("center", "good_to"), [(2000, 3e-7), (2003, 4e-6), (2030, 3e-4)])
def test_r2_is_as_good_as_its_center(center, good_to):
    rng = np.random.default_rng(0)
    truth = rng.normal(2000, 1, 10_007).astype(np.float32)
    guess = (truth + 0.5 * rng.normal(size=10_007)).astype(np.float32)
    exact = sk.r2_score(truth.astype(np.float64), guess.astype(np.float64))
    assert r2_in_parts(guess, truth, center) == pytest.approx(exact, abs=good_to * (1 - exact))


def test_a_center_that_float32_cannot_see_from_is_nan_and_a_better_one_is_named():
    truth = np.random.default_rng(0).normal(2000, 1, 500).astype(np.float32)
    both = np.stack([truth - 2000, truth], axis=1)
    with pytest.warns(RuntimeWarning, match=r"r2\(center=0\) is NaN: .* give center=(1999.9|2000)"):
        assert np.isnan(value(metrics.r2(both, both)))
    assert value(metrics.r2(both, both, center=(0, 2000))) == 1


def test_constant_targets_and_a_single_example():
    five = np.full(4, 5, np.float32)
    assert value(metrics.r2(five, five, center=5)) == sk.r2_score(five, five) == 1
    assert value(metrics.r2(five + 1, five, center=5)) == sk.r2_score(five, five + 1) == 0
    assert np.isnan(value(metrics.r2(five[:1], five[:1])))


@pytest.mark.parametrize("constant", [5.0, 0.1, -3e7, 0.0])
def test_constant_targets_are_constant_from_any_center(constant):
    same = np.full((3000, 1), constant, np.float32)
    assert r2_in_parts(same, same, 1) == 1
    assert r2_in_parts(same + 7, same, 1) == 0
    varied = same.copy()
    varied[2000] = np.nextafter(varied[2000], np.float32(np.inf))
    if constant == 5:
        with pytest.warns(RuntimeWarning, match="is NaN"):
            assert np.isnan(r2_in_parts(same + 7, varied, 1))
        both = np.concatenate([same, np.arange(3000, dtype=np.float32)[:, None] - 1500], axis=1)
        assert value(metrics.r2(both, both, center=(1, 0))) == 1


def test_zeros_of_both_signs_are_constant():
    zeros = np.array([0.0, -0.0], np.float32)
    assert value(metrics.r2(zeros + 1, zeros)) == 0


def test_perplexity_is_of_the_mean_and_not_the_mean_of_perplexities():
    nats = np.array([1.0, 3.0], np.float32)
    assert value(metrics.perplexity(Sum.of(nats))) == pytest.approx(np.exp(2), rel=1e-12)
    assert value(metrics.perplexity(Sum.of(1e4 * nats))) == np.inf


@pytest.mark.parametrize("metric", [metrics.mse, metrics.rmse, metrics.mae, metrics.r2])
def test_shapes_that_would_broadcast_are_refused(metric):
    with refused(RecipeError, "shapes-differ", name="targets", value=(4,)):
        metric(np.zeros((4, 1), np.float32), np.zeros(4, np.float32))
    with refused(RecipeError, "not-floats", name="predictions", value="int32"):
        metric(np.zeros(4, np.int32), np.zeros(4))


def test_a_center_for_each_value_or_one():
    with refused(RecipeError, "center-values", value=2):
        metrics.r2(np.zeros((4, 3), np.float32), np.zeros((4, 3)), center=(1, 2))
