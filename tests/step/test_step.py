"""The promise: the same bits on every device count, however the replicas are cut."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.data.sources import spec_of
from chipwise.run.session import Session
from chipwise.step import blueprint, keys, window
from chipwise.step.layout import Layout
from chipwise.step.replica import ReplicaInput
from chipwise.step.state import abstract_state, init_state
from chipwise.step.step import Step
from refusals import refused
from sessions import bits, run

pytestmark = pytest.mark.as_users_compile


def close(a, b, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("replicas", [8, 12, 6, 4, 3])
def test_every_device_count_gives_the_same_bits(replicas):
    recipe = tasks.recipe(replicas=replicas, ema=0.9)
    first, *others = [bits(run(recipe, devices)) for devices in range(1, min(replicas, 8) + 1)]
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    "shares, made",
    [
        ((1, 5, 2), tasks.quick),
        *(pytest.param(n, tasks.recipe, marks=pytest.mark.slow) for n in ((1, 5, 2), (2, 2, 4))),
    ],
)
def test_any_shares_give_the_same_bits_streamed_and_with_shared_state(shares, made):
    recipe = made(ema=0.9, duration="8st", optimizer=cw.adamw(lr=0.02, weight_decay=0.01, clip=0.5))
    one, cut = (
        run(recipe, None, feed=feed, shares=shares, shard_optimizer=shard)
        for feed, shares, shard in (("device", (8,), None), ("host", shares, True))
    )
    assert bits(cut) == bits(one)


def looped(loss, **feed):
    recipe = tasks.recipe(duration="2st", task=tasks.task(loss=loss))
    with Session(recipe, cw.On(devices=1, **feed)) as session:
        session.begin()
        session.compile()
        return session.programs.blueprint.looped


@pytest.mark.slow
def test_small_replicas_are_turns_of_a_loop_unless_their_convolutions_are_slow_there():
    def across(params, state, batch, key, train):
        row = params["w"].reshape(1, 1, -1)
        params = {**params, "w": jax.lax.conv(row, row[:, :, :1], (1,), "SAME").reshape(params["w"].shape)}
        return tasks.loss(params, state, batch, key, train)

    assert looped(tasks.loss)
    assert not looped(across)


BFLOAT16 = {"precision": "bf16", "task": tasks.task(loss=tasks.plain_loss, augment=None)}


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("changes", [{}, {"replicas": 6}, BFLOAT16])
def test_streamed_turns_have_the_same_bits(changes):
    recipe = tasks.recipe(duration="8st", **changes)
    first, *others = [bits(run(recipe, n, feed="host")) for n in (1, 2, 3, 5, recipe.replicas)]
    assert all(other == first for other in others)


@pytest.mark.parametrize("examples", [4, 5, 11, 12, 13])
def test_every_occurrence_of_an_example_has_its_own_epoch(examples):
    """Also in a batch of 12 that spans several, or an example would be augmented twice in the same way."""
    recipe = tasks.recipe(task=tasks.task(train=tasks.data(examples)), batch=12, replicas=2, duration="4st")
    whole = Step(recipe, Layout.of(recipe, 1))
    columns = window.flat(tasks.data(examples).columns)
    rows, columns = jax.tree.map(jnp.asarray, (window.host_window(recipe, 0, 4)["rows"], columns))
    for step in range(4):
        picked = whole.pick(jnp.int32(step), rows, columns)
        state = dataclasses.replace(whole.state, step=jnp.int32(step))
        places = [jnp.int32([replica, replica]) for replica in (0, 1)]
        made = [whole.take(ReplicaInput.of(state, rows, picked, place)) for place in places]
        epochs = np.concatenate([batch.epochs for batch in made])
        np.testing.assert_array_equal(epochs, (12 * step + np.arange(12)) // examples)


@pytest.mark.slow
def test_many_replicas_on_a_device_meet_on_a_stack_with_the_same_bits(monkeypatch):
    monkeypatch.setattr(blueprint, "LOOP_BYTES", 0)
    recipe = tasks.recipe(replicas=24, batch=24, duration="6st")
    first, *others = [bits(run(recipe, devices)) for devices in (1, 2, 5, 7, 8)]
    assert all(other == first for other in others)


@pytest.mark.slow
def test_bfloat16_is_exact_too():
    recipe = tasks.recipe(
        precision="bf16", duration="8st", task=tasks.task(loss=tasks.plain_loss, augment=None)
    )
    assert bits(run(recipe, 1)) == bits(run(recipe, 4))


@pytest.mark.slow
def test_the_seed_matters_and_the_run_repeats():
    first = bits(run(tasks.recipe(duration="5st"), 1))
    assert bits(run(tasks.recipe(duration="5st"), 1)) == first
    assert bits(run(tasks.recipe(duration="5st", seed=4), 1)) != first


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 8))])
def test_without_exactness_the_meaning_stays(devices):
    recipe = tasks.recipe(duration="8st")
    close(run(recipe, devices, exact=False).params, run(recipe, 1).params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: cw.sgd(lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.05, clip=0.1),
        lambda: cw.adamw(lr=0.02, weight_decay=0.5),
    ],
)
def test_replicas_change_nothing_but_batch_statistics_and_keys(optimizer):
    """Decay acts once, after the sum: with R replicas it must not act R times."""
    task = tasks.task(loss=tasks.plain_loss, augment=None)
    one, eight = (
        run(tasks.recipe(task=task, replicas=r, optimizer=optimizer(), duration="20st"), 1) for r in (1, 8)
    )
    close(one.params, eight.params)


@pytest.mark.slow
def test_averaged_state_is_the_mean_over_replicas_and_counters_count_once():
    one = run(tasks.recipe(replicas=1, duration="1st", task=tasks.task(augment=None)), 1)
    eight = run(tasks.recipe(replicas=8, duration="1st", task=tasks.task(augment=None)), 1)
    # The mean over the batch is the mean of the replicas' means, for equal parts.
    close(one.state["mean"], eight.state["mean"])
    assert one.state["calls"] == eight.state["calls"] == 1
    assert eight.state["calls"].dtype == np.int32


@pytest.mark.slow
def test_a_step_compiles_once_whatever_the_rate():
    traced = []

    def loss(params, state, batch, key, train):
        traced.append(train)
        return tasks.plain_loss(params, state, batch, key, train)

    task = tasks.task(loss=loss, augment=None)
    run(tasks.recipe(task=task, optimizer=cw.sgd(lr=cw.schedules.cosine(0.1)), duration="50st"), 2)
    few = len(traced)
    run(tasks.recipe(task=task, optimizer=cw.sgd(lr=cw.schedules.cosine(0.1)), duration="3st"), 2)
    assert few <= 4 and len(traced) <= 2 * few  # and not one more for 50 steps than for 3


@pytest.mark.parametrize(
    "made,expected",
    [
        (lambda s: (({"loss": 3.0}), s), "metric-is-no-sum"),
        (lambda s: (({"accuracy": cw.Sum(1.0, 1.0)}), s), "loss-without-loss"),
        (lambda s: {"loss": cw.Sum(1.0, 1.0)}, "loss-returns"),
        (lambda s: ({"loss": cw.Sum(np.ones(3, np.float32), 3.0)}, s), "loss-is-no-number"),
        (lambda s: ({"loss": cw.Sum(1.0, 1.0)}, {}), "state-of-another-structure"),
    ],
)
def test_a_loss_that_breaks_the_contract_is_told_how(made, expected):
    task = tasks.task(loss=lambda params, state, batch, key, train: made(state))
    recipe = tasks.recipe(task=task)
    with refused(cw.errors.RecipeError, expected):
        jax.eval_shape(lambda: init_state(recipe, spec_of(recipe.task.train)))


@pytest.mark.parametrize(
    ("first", "after", "made", "got"),
    [
        (0.0, lambda old, x: 0.9 * old + 0.1 * x.mean(0), "float32 ()", "float32 (12,)"),
        (0, lambda old, x: 0.9 * old + 0.1 * x.mean(), "int32 ()", "float32 ()"),
        (0.0, lambda old, x: jnp.argmax(x), "float32 ()", "int32 ()"),
        (0, lambda old, x: old + 1j, "int32 ()", "complex64 ()"),
        (0, lambda old, x: 1.5, "int32 ()", "float32 ()"),
    ],
)
def test_a_state_of_another_shape_or_kind_than_the_first_is_refused(first, after, made, got):
    recipe = tasks.recipe(task=stateful({"ema": first}, lambda old, x: {"ema": after(old["ema"], x)}))
    with refused(cw.errors.RecipeError, "state-changed", path="ema", made=made, got=got):
        abstract_state(recipe)


def test_complex_state_is_refused():
    recipe = tasks.recipe(task=stateful({"phase": {"a": np.complex64(1j)}}, lambda old, x: old))
    with refused(cw.errors.RecipeError, "state-complex", path="phase/a", dtype="complex64"):
        abstract_state(recipe)


@pytest.mark.parametrize(
    ("first", "after"),
    [
        (jnp.bfloat16(1), lambda old: old.astype(jnp.float32) + 1),
        (jnp.float32(1), lambda old: (old + 1).astype(jnp.float16)),
        (np.int32(1), lambda old: old.astype(jnp.uint8) + 1),
        (True, lambda old: jnp.int32(1)),
        (1.0, lambda old: 2.0),
        (1, lambda old: 2),
        (1, lambda old: np.int32(2)),
    ],
)
def test_a_state_keeps_its_type_of_one_kind(first, after):
    task = stateful({"a": first, "b": 3}, lambda old, x: {"a": after(old["a"]), "b": old["b"] + 1})
    state = run(tasks.recipe(task=task, duration="1st", replicas=4), 1).state
    assert state["a"].dtype == jnp.asarray(first).dtype
    assert state["a"] == (1 if first is True else 2) and state["b"] == 4


def stateful(first, after):
    """The task with another state in training."""

    def loss(params, state, batch, key, train):
        own = tasks.init(jax.random.key(0))[1]
        metrics, _ = tasks.loss(params, own, batch, key, train)
        return metrics, after(state, batch["x"].astype(jnp.float32)) if train else state

    return tasks.task(init=lambda key: (tasks.init(key)[0], first), loss=loss)


@pytest.mark.parametrize("name, more", [("label", {}), ("y", {"uncast": ("y",)})])
def test_in_bf16_what_is_to_be_learned_keeps_its_digits(name, more):
    seen = {}

    def loss(params, state, batch, key, train):
        seen.update({name: column.dtype for name, column in batch.items()})
        error = cw.losses.squared_error(batch["x"] @ params["w"], batch[name])
        return {"loss": cw.Sum.of(error)}, state

    columns = {"x": np.ones((9, 3), np.float32), name: np.full((9, 1), 1234.5, np.float32)}
    source = cw.Arrays(**columns)
    init = lambda key: ({"w": jnp.zeros((3, 1))}, {})  # noqa: E731
    task = cw.Task(init=init, loss=loss, train=source, eval=source, **more)
    recipe = cw.Recipe(task=task, batch=8, duration="1st", optimizer=cw.sgd(lr=0.1), precision="bf16")
    result = cw.fit(recipe, on=cw.On(devices=1), progress="none")
    assert seen == {"x": jnp.bfloat16, name: jnp.float32}
    assert result.metrics["train/loss"] == 1234.5**2


@pytest.mark.slow
def test_seeds_and_rates_are_inputs():
    """Recipes that differ in nothing else are one program, so that a study compiles once."""

    def lowered(**changes):
        recipe = tasks.recipe(**changes)
        step = Step(recipe, Layout(recipe.batch, recipe.replicas, 2, exact=True))
        specs = step.specs()
        rows = specs["window"]["rows"]
        inputs = ReplicaInput.of(specs["state"], rows, specs["data"], specs["place"])
        state, hyper = specs["state"].without("donated"), specs["window"]["hyper"]
        update = (state, specs["vector"], hyper, specs["squares"])
        return [
            jax.jit(step.replica).lower(inputs).as_text(),
            jax.jit(step.update).lower(*update).as_text(),
            jax.jit(lambda seed: init_state(recipe, step.spec, seed)).lower(np.uint32(0)).as_text(),
        ]

    same = lowered(seed=7, optimizer=cw.adamw(lr=cw.one_cycle(0.3, warmup="20%"), weight_decay=0.02))
    assert lowered() == same
    assert lowered(optimizer=cw.adamw(lr=0.02, b1=0.8, eps=1e-6)) != same


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_seed_as_an_input_gives_the_keys_of_the_number(seed):
    inputs = jax.jit(keys.init_key)(np.uint32(seed))
    np.testing.assert_array_equal(jax.random.key_data(inputs), jax.random.key_data(keys.init_key(seed)))


def test_shares_are_numbers():
    with refused(cw.errors.RecipeError, "wrong-kind", shares="fast"):
        cw.On(shares="fast")
