"""Answers alone are learnt where a pack says which tokens those are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import chipwise as cw
from chipwise.run.evaluate import evaluate
from chipwise.step import keys

pytestmark = [pytest.mark.slow, pytest.mark.as_users_compile]

KINDS, CONTEXT = 13, 8
SIZES = [f"context={CONTEXT}", f"vocabulary={KINDS}", "depth=1", "width=16", "heads=2", "precision=f32"]
NETS = {"gpt2-124m": SIZES, "llama-8b": [*SIZES, "kv_heads=1", "hidden=24", "shards=1"]}

rng = np.random.default_rng(0)
TOKEN = rng.integers(0, KINDS, (16, CONTEXT + 1)).astype(np.uint16)
MASK = np.zeros(TOKEN.shape, np.uint8)
MASK[[1, 6, 7], 5:] = MASK[6, 3] = 1
"""Of sixteen examples, thirteen have nothing to learn: most replicas add nothing."""


def recipe(name, mask=MASK):
    made = cw.load(name, [*NETS[name], "batch=16", "replicas=8", "duration=3st"], synthetic=True)
    data = cw.Arrays(token=TOKEN, mask=mask)
    task = dataclasses.replace(made.task, train=data, eval=data)
    return dataclasses.replace(made, task=task, optimizer=cw.adamw(lr=0.01))


@pytest.mark.parametrize("name", NETS)
def test_the_gradient_is_that_of_the_answers(name):
    """Each counted token's loss by itself, from the logits after all that is before it."""
    task = recipe(name).task
    params, state = task.init(jax.random.key(3))

    def ours(params):
        return task.loss(params, state, {"token": TOKEN, "mask": MASK}, None, False)[0]["loss"]

    def theirs(params):
        each = []
        for row, at in np.argwhere(MASK[:, 1:]):
            logits = task.predict(params, state, {"token": jnp.asarray(TOKEN[row : row + 1, : at + 1])})
            label = jnp.asarray(TOKEN[row : row + 1, at + 1], jnp.int32)
            each.append(optax.softmax_cross_entropy_with_integer_labels(logits, label)[0])
        return sum(each)

    expected, wanted = jax.jit(jax.value_and_grad(theirs))(params)
    assert float(jax.jit(lambda p: ours(p).count)(params)) == MASK[:, 1:].sum() == 13
    total, gradient = jax.jit(jax.value_and_grad(lambda p: ours(p).total))(params)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, wanted)


def test_the_mean_is_of_the_step_on_any_devices():
    """So a replica counts as much as it has answers, and one without any is no NaN."""
    results = [
        cw.fit(recipe("gpt2-124m"), on=cw.On(devices=n), log_every="1st", progress="none")
        for n in (1, 2, 3, 8)
    ]
    assert len({one.fingerprint for one in results}) == 1
    first, task = results[0], recipe("gpt2-124m").task
    begun = task.init(keys.init_key(0))
    sums = task.loss(*begun, {"token": jnp.asarray(TOKEN), "mask": jnp.asarray(MASK)}, None, True)[0]
    whole = sums["loss"].total / sums["loss"].count
    assert first.history[0]["train/loss"] == pytest.approx(float(whole), rel=1e-5)
    assert all(one.metrics == first.metrics for one in results)


def test_evaluation_counts_the_same_tokens():
    made = recipe("gpt2-124m")
    model = made.task.init(jax.random.key(1))
    sums = made.task.loss(*model, {"token": jnp.asarray(TOKEN), "mask": jnp.asarray(MASK)}, None, False)[0]
    found = [evaluate(made, *model, on=cw.On(devices=n)) for n in (1, 3)]
    assert found[0] == found[1]
    assert found[0]["loss"] == pytest.approx(float(sums["loss"].total) / 13, rel=1e-5)


def test_a_mask_of_ones_is_no_mask():
    def trained(columns):
        made = recipe("gpt2-124m")
        task = dataclasses.replace(made.task, train=cw.Arrays(**columns), eval=None)
        return cw.fit(dataclasses.replace(made, task=task), on=cw.On(devices=1), progress="none").fingerprint

    assert trained({"token": TOKEN}) == trained({"token": TOKEN, "mask": np.ones_like(MASK)})
