"""Weighted sampling: the right shares, a function of seed and epoch, exact on any devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
from chipwise.base.errors import DataError
from chipwise.data import Weighted, order
from chipwise.data.compared import compared
from chipwise.data.sources import take
from chipwise.data.weighted import by_epoch
from refusals import refused

pytestmark = pytest.mark.as_users_compile

N = 40
SOURCE = cw.Arrays(x=np.arange(N, dtype=np.float32)[:, None], label=(np.arange(N) < 4).astype(np.int32))
WEIGHTS = np.where(np.arange(N) < 4, 9.0, 1.0)  # 4 of 40 are half of an epoch


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_every_example_comes_its_share_rounded_up_or_down(n):
    rng = np.random.default_rng(n)
    weights = rng.random(n) * (rng.random(n) < 0.7) + (np.arange(n) == 0)
    share = n * weights / weights.sum()
    total = np.zeros(n)
    for epoch in range(200):
        counts = np.bincount(order.weighted(5, epoch, weights), minlength=n)
        assert counts.sum() == n and not counts[weights == 0].any()
        assert (counts >= np.floor(share - 1e-9)).all() and (counts <= np.ceil(share + 1e-9)).all()
        total += counts
    assert np.abs(total / 200 - share).max() < 0.2  # 5 standard deviations of a share rounded at random
    if n == 1000:
        assert (order.weighted(5, 0, weights) != order.weighted(5, 1, weights)).any()


@pytest.mark.parametrize("n", [1, 3, 1000])
def test_equal_weights_are_none(n):
    for epoch in range(20):
        assert order.weighted(1, epoch, np.full(n, 0.1)).tolist() == list(range(n))


def test_an_epoch_is_read_by_position_with_or_without_fill():
    rows = [SOURCE[i] for i in range(N)]
    filled, listed = (by_epoch(Weighted(source, WEIGHTS), 3) for source in (SOURCE, rows))
    assert hasattr(filled, "fill") and not hasattr(listed, "fill")
    positions = np.arange(N - 7, 2 * N + 7)  # of three epochs
    got, same = take(filled, positions), take(listed, positions)
    np.testing.assert_array_equal(got["x"], same["x"])
    assert got["x"][:, 0].tolist() == filled.indices(positions).tolist()


def recipe(source):
    def init(key):
        return {"w": jnp.zeros((1, 2), jnp.float32)}, {}

    def loss(params, state, batch, key, train):
        noise = jax.random.normal(key, (len(batch["x"]), 1), jnp.float32)
        logits = (batch["x"] + noise) @ params["w"] / 40
        each = cw.losses.softmax_cross_entropy(logits, batch["label"])
        return {"loss": cw.Sum.of(each), "rare": cw.Sum.of(batch["label"].astype(jnp.float32))}, state

    def moved(example, key):
        return {**example, "x": example["x"] + jax.random.uniform(key, (1,), jnp.float32)}

    task = cw.Task(init=init, loss=loss, train=source, classes=2, augment=moved)
    return cw.Recipe(task=task, batch=8, replicas=8, duration="4ep", optimizer=cw.sgd(lr=0.1), seed=3)


@pytest.mark.slow
def test_the_same_bits_on_any_devices_and_after_a_stop(tmp_path):
    quiet = {"progress": "none", "eval_every": None}
    first = cw.fit(recipe(Weighted(SOURCE, WEIGHTS)), on=cw.On(devices=1), log_every="1ep", **quiet)
    at = {"run": tmp_path / "run", **quiet}
    cw.fit(recipe(Weighted(SOURCE, WEIGHTS)), on=cw.On(devices=3), stop_after="7st", **at)
    again = cw.fit(recipe(Weighted(SOURCE, WEIGHTS)), on=cw.On(devices=2), **at)
    assert again.fingerprint == first.fingerprint
    assert abs(first.metrics["train/rare"] - 20 / 40) < 0.06
    plain = cw.fit(recipe(SOURCE), on=cw.On(devices=1), **quiet).fingerprint
    assert cw.fit(recipe(Weighted(SOURCE, np.ones(N))), on=cw.On(devices=1), **quiet).fingerprint == plain


def test_a_run_does_not_go_on_with_other_weights():
    one, same, other = (compared(Weighted(SOURCE, w)).text for w in (WEIGHTS, WEIGHTS * 1.0, WEIGHTS + 1))
    assert one == same and len({one, other, compared(SOURCE).text}) == 3


@pytest.mark.parametrize("weights", [np.ones(N - 1), np.zeros(N), -np.ones(N), np.full(N, np.inf), [[1.0]]])
def test_other_weights_are_refused(weights):
    with refused(cw.errors.DataError, "weights-wrong", n=N):
        Weighted(SOURCE, weights)


def test_weights_inside_another_source_are_refused():
    with refused(DataError, "weights-inside", outer="Cached"):
        by_epoch(cw.data.Cached(Weighted(SOURCE, WEIGHTS)), 0)
    with refused(DataError, "weights-inside", outer="Renamed"):
        by_epoch(cw.data.Renamed(Weighted(SOURCE, WEIGHTS), ("a", "b")), 0)
