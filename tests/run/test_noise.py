"""The gradient noise scale of a run: its definition, any number of devices, every step, resumption."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.base.errors import RecipeError
from chipwise.data.datasets import digits
from chipwise.data.sources import materialize
from chipwise.run.noise import DECAY, SCALE, SQUARE, TRACE, scale_of
from refusals import refused

pytestmark = pytest.mark.as_users_compile

HOW = {"progress": "none", "log_every": "2st", "eval_every": None}


def noise(result):
    return [(row["step"], row[SQUARE], row[TRACE], row.get(SCALE)) for row in result.history if SQUARE in row]


def fitted(recipe, devices=1, run=None, stop=None, **on):
    return cw.fit(recipe, run, on=cw.On(devices=devices, noise=True, **on), stop_after=stop, **HOW)


@pytest.fixture(scope="module")
def alone():
    return fitted(tasks.quick(duration="6st"))


SHARED = {"feed": "host", "shard_optimizer": True}


@pytest.mark.slow
@pytest.mark.parametrize("devices, on", [(3, SHARED), (3, {}), (8, SHARED)])
def test_it_is_equal_on_any_devices_and_changes_no_bit(alone, devices, on):
    other = fitted(tasks.quick(duration="6st"), devices, **on)
    plain = cw.fit(tasks.quick(duration="6st"), on=cw.On(devices=devices), **HOW)
    assert noise(other) == noise(alone) and len(noise(alone)) == 3
    assert other.fingerprint == alone.fingerprint == plain.fingerprint
    assert SQUARE not in plain.history[0]


OTHERS = {
    "of-digits": None,
    "by-leaf": {"optimizer": cw.recipe.lamb(lr=0.02, weight_decay=0.01, clip=0.5)},
    "groups": {"shards": 2, "batch": 48},
    "together": {"blocks": 4},
}
COUNTS = {"of-digits": (1, 2, 3, 8), "groups": (2, 8), "together": (1, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_it_is_equal_for_every_kind_of_step(kind):
    digits = OTHERS[kind] is None
    recipe = cw.load("digits", ["duration=6st"]) if digits else tasks.quick(**OTHERS[kind], duration="6st")
    results = [fitted(recipe, count) for count in COUNTS.get(kind, (1, 3))]
    if kind == "by-leaf":
        results.append(fitted(recipe, 3, shard_optimizer=True))
    assert all(noise(result) == noise(results[0]) for result in results)
    assert all(square != 0 < trace for _, square, trace, _ in noise(results[0]))


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_rows_of_one_that_never_stopped(alone, tmp_path):
    recipe = tasks.quick(duration="6st")
    fitted(recipe, 1, tmp_path / "run", stop="3st")
    again = noise(fitted(recipe, 2, tmp_path / "run"))
    assert again == noise(alone)
    curve = cw.report(tmp_path / "run")["curves"][SCALE]
    assert [(point[0], point[3]) for point in curve] == [(row[0], row[3]) for row in again if row[3]]


@pytest.mark.parametrize(
    "settings, how",
    [
        ({"replicas": 1}, "--set replicas=8"),
        ({"replicas": 8, "blocks": 1}, "--set blocks=8"),
        ({"replicas": 1, "batch": 1}, "--set batch=8 --set replicas=8"),
    ],
)
def test_a_step_of_one_block_is_refused(settings, how):
    with refused(RecipeError, "noise-one-block", how=how):
        fitted(tasks.quick(**settings))


def test_averages_are_taken_before_the_ratio():
    rows = [{SQUARE: square, TRACE: trace} for square, trace in ((1.0, 8.0), (-0.5, 4.0), (2.0, 6.0))]
    weights = [DECAY**2, DECAY, 1.0]
    square, trace = (np.dot(weights, [row[name] for row in rows]) for name in (SQUARE, TRACE))
    others = [{"train/loss": 1.0}]
    assert scale_of(itertools.chain(others, reversed(rows)))[SCALE] == pytest.approx(trace / square)
    assert scale_of([]) == scale_of([rows[1]]) == scale_of(others) == {}


def softmax(params, state, batch, key, train):
    x = batch["image"].reshape(len(batch["image"]), -1).astype(jnp.float32) / jnp.float32(16)
    return {"loss": cw.Sum.of(cw.losses.softmax_cross_entropy(x @ params["w"], batch["label"]))}, state


@pytest.mark.slow
def test_it_is_what_the_definition_says_of_single_examples():
    """1,000 gradients of one example each, and 60 steps of 8 blocks at the same parameters."""
    data = digits().train
    weights = {"w": np.random.default_rng(0).normal(0, 0.1, (64, 10)).astype(np.float32)}
    task = cw.Task(init=lambda key: (weights, {}), loss=softmax, train=data)
    recipe = cw.Recipe(task=task, batch=64, replicas=8, duration="60st", optimizer=cw.recipe.sgd(lr=0.0))
    rows = noise(cw.fit(recipe, on=cw.On(devices=1, noise=True), log_every="1st", progress="none"))

    def loss(params, image, label):
        sums, _ = softmax(params, {}, {"image": image[None], "label": label[None]}, None, True)
        return sums["loss"].total

    columns = materialize(data)
    one = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))
    each = np.asarray(one(weights, columns["image"][:1000], columns["label"][:1000])["w"], np.float64)
    each = each.reshape(1000, -1)
    trace = each.var(axis=0, ddof=1).sum()
    square = (each.mean(axis=0) ** 2).sum() - trace / 1000
    for expected, values in ((square, [r[1] for r in rows]), (trace, [r[2] for r in rows])):
        error = np.std(values, ddof=1) / np.sqrt(len(values))
        assert abs(np.mean(values) - expected) < 2 * error + 0.1 * expected
    assert rows[-1][3] == pytest.approx(trace / square, rel=0.3)
