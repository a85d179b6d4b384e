"""Typed random keys of a task and an optimizer: what is trained, saved, predicted and exported with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import chipwise as cw
import tasks
from chipwise.base.errors import RecipeError
from chipwise.proof.audit import audit
from chipwise.recipe.random_keys import KeyData, as_data, as_keys
from chipwise.recipe.task import by_path
from chipwise.step.state import abstract_state, nbytes
from refusals import refused

QUIET = {"progress": "none", "eval_every": None}
GENERATORS = "threefry2x32", "rbg", "unsafe_rbg"


def adding_noise(learning_rate):
    noise = optax.add_noise(0.01, 0.5, jax.random.key(7, impl="rbg"))
    return optax.chain(noise, optax.adam(learning_rate))


def noisy_loss(params, state, batch, key, train):
    if train:
        after, own = jax.random.split(state["key"])
        noise = jax.random.normal(own, batch["x"].shape)
        state, batch = {**state, "key": after}, {**batch, "x": batch["x"].astype(jnp.float32) + noise}
    return tasks.quick_loss(params, state, batch, key, train)


def noisy_outputs(params, state, inputs):
    return tasks.plain_logits(params, inputs) + jax.random.normal(state["key"], (1, tasks.CLASSES))


def recipe(make=jax.random.key, optimizer=adding_noise, **changes):
    """One with a key in the task's state, and another in its optimizer's."""

    def init(key):
        params, state = tasks.init(key)
        return params, {**state, "key": make(5)}

    about = {"init": init, "loss": noisy_loss, "predict": noisy_outputs, "classes": tasks.CLASSES}
    made = {"duration": "6st", "ema": 0.9, **changes}
    return tasks.quick(
        task=tasks.quick_task(**about), optimizer=cw.from_optax(optimizer, learning_rate=0.01), **made
    )


def words(key):
    return np.asarray(jax.random.key_data(key))


@pytest.mark.parametrize("generator", GENERATORS)
def test_keys_are_words_and_keys_again(generator):
    keys = jax.random.split(jax.random.key(1, impl=generator), 3)
    data = as_data({"a": keys, "b": 2.0})
    assert data["a"].generator == generator and as_data(data) == data
    assert list(by_path(data)) == [f"a/{generator}", "b"]
    again = as_keys(jax.device_get(data))
    assert again["a"].dtype == keys.dtype and again["b"] == 2.0
    np.testing.assert_array_equal(words(again["a"]), words(keys))
    shapes = jax.eval_shape(as_keys, jax.eval_shape(lambda: data))
    assert shapes["a"].dtype == keys.dtype and shapes["a"].shape == (3,)


def test_they_are_counted_by_their_words():
    typed, raw = (abstract_state(recipe(make)) for make in (jax.random.key, jax.random.PRNGKey))
    assert isinstance(typed.state["key"], KeyData)
    assert nbytes(typed.state) == nbytes(raw.state)


@pytest.mark.slow
@pytest.mark.as_users_compile
def test_a_key_of_the_state_is_replica_0s_as_its_words_would_be():
    typed = cw.fit(recipe(optimizer=optax.sgd), on=cw.On(devices=1), **QUIET)
    raw = cw.fit(recipe(jax.random.PRNGKey, optax.sgd), on=cw.On(devices=3), **QUIET)
    assert typed.fingerprint == raw.fingerprint
    expected = jax.random.key(5)
    for _ in range(6):
        expected = jax.random.split(expected)[0]
    assert typed.state["key"].dtype == expected.dtype
    np.testing.assert_array_equal(words(typed.state["key"]), words(expected))
    np.testing.assert_array_equal(raw.state["key"], words(expected))


@pytest.fixture(scope="module")
def whole():
    return cw.fit(recipe(), on=cw.On(devices=1), **QUIET)


@pytest.mark.as_users_compile
@pytest.mark.parametrize(
    "devices, shard",
    [
        (1, None),
        pytest.param(3, True, marks=pytest.mark.slow),
        *(pytest.param(n, s, marks=pytest.mark.slow) for n in (2, 8) for s in (True, False)),
    ],
)
def test_a_run_is_saved_and_goes_on_with_its_keys(whole, tmp_path, devices, shard):
    on = cw.On(devices=devices, shard_optimizer=shard)
    first = cw.fit(recipe(), tmp_path / "run", on=on, stop_after="4st", checkpoint_every="2st", **QUIET)
    assert first.steps == 4
    again = cw.fit(recipe(), tmp_path / "run", on=on, checkpoint_every="2st", **QUIET)
    assert again.devices["update"] == ("sharded" if shard else "whole")
    assert again.fingerprint == whole.fingerprint
    for result in (again, cw.result(tmp_path / "run", recipe())):
        np.testing.assert_array_equal(words(result.state["key"]), words(whole.state["key"]))
    assert audit(tmp_path / "run", recipe(), on=cw.On(devices=2))[0].code == "audit-passed"


@pytest.mark.slow
@pytest.mark.as_users_compile
def test_a_model_with_keys_is_evaluated_predicted_exported_and_begun_with(whole, tmp_path):
    outputs = cw.predict(whole).outputs
    made = cw.export(whole, "stablehlo", tmp_path / "model.stablehlo")
    assert made.labels_differ == 0
    assert set(cw.evaluate(whole)) == {"loss", "accuracy"}
    cw.export(whole, "safetensors", tmp_path / "model.safetensors")
    begun = recipe()
    task = cw.pretrained(tmp_path / "model.safetensors").start(begun.task)
    with cw.Stepper(tasks.quick(task=task), cw.On(devices=1)) as stepper:
        params, state = stepper.state()
    np.testing.assert_array_equal(words(state["key"]), words(whole.state["key"]))
    known = cw.deploy.Trained(begun, params, state)
    np.testing.assert_array_equal(cw.predict(known).outputs, outputs)


@pytest.mark.slow
def test_groups_hold_keys_too(tmp_path):
    made = functools.partial(tasks.quick, task=recipe().task, batch=32, replicas=4, shards=2, duration="6st")
    cw.fit(made(), tmp_path / "run", on=cw.On(devices=2), stop_after="3st", **QUIET)
    result = cw.fit(made(), tmp_path / "run", on=cw.On(devices=4), **QUIET)
    assert result.fingerprint == cw.fit(made(), on=cw.On(devices=8), **QUIET).fingerprint
    assert jax.dtypes.issubdtype(result.state["key"].dtype, jax.dtypes.prng_key)


def test_keys_that_cannot_be_used_are_refused_before_the_first_step():
    with refused(RecipeError, "elementwise-with-keys"):
        noisy = cw.from_optax(adding_noise, learning_rate=0.01, elementwise=True)
        abstract_state(tasks.quick(optimizer=noisy))

    def init(key):
        return {**tasks.init(key)[0], "key": key}, tasks.init(key)[1]

    with refused(RecipeError, "parameter-without-gradient", dtypes=["key<fry>"]):
        abstract_state(tasks.quick(task=tasks.quick_task(init=init)))

    def untyped(params, state, batch, key, train):
        state = {**state, "key": jax.random.key_data(state["key"])}
        return tasks.quick_loss(params, state, batch, key, train)

    task = tasks.quick_task(init=recipe().task.init, loss=untyped)
    with refused(RecipeError, "state-of-another-structure"):
        abstract_state(tasks.quick(task=task))
