import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.machine.detect import detect
from chipwise.recipe.recipe import difference
from chipwise.run.evaluate import Evaluator, evaluate
from chipwise.run.placement import Placement
from refusals import refused

pytestmark = pytest.mark.as_users_compile

PARAMS, STATE = jax.tree.map(np.asarray, tasks.init(jax.random.key(1)))
EXAMPLES = 53


def evaluated(batch, devices, source=None):
    task = tasks.task() if source is None else tasks.task(eval=source)
    return evaluate(tasks.recipe(task=task), PARAMS, STATE, batch=batch, on=cw.On(devices=devices))


@pytest.mark.slow
def test_every_example_counts_once():
    metrics = evaluated(None, 8)
    made, _ = tasks.loss(PARAMS, STATE, tasks.data(EXAMPLES, 1).columns, None, False)
    assert metrics["accuracy"] * EXAMPLES == pytest.approx(float(made["accuracy"].total), abs=1e-9)
    assert metrics["loss"] == pytest.approx(float(made["loss"].value), rel=1e-5)


@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize(
    "examples", [9, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 7, 8, 15, 16, 17, 53))]
)
def test_values_have_the_same_bits_on_any_devices_for_any_batch_resident_and_streamed(examples, monkeypatch):
    made = tasks.recipe(task=tasks.task(eval=tasks.data(examples, 1)), eval_block=4)
    alone = evaluate(made, PARAMS, STATE, on=cw.On(devices=1))
    for devices in (2, 3, 8):
        assert evaluate(made, PARAMS, STATE, on=cw.On(devices=devices)) == alone
    monkeypatch.setattr("chipwise.run.feed.fits", lambda source, limit: False)
    for devices, batch in ((1, None), (1, 7), (3, 1000), (8, 33)):
        assert evaluate(made, PARAMS, STATE, batch=batch, on=cw.On(devices=devices)) == alone


def test_the_block_is_the_recipes_and_no_devices():
    made = tasks.recipe()
    sizes = [Evaluator(made, Placement(detect(n))).blocks.size for n in (1, 2, 8)]
    assert sizes == [7, 7, 7]  # an eighth of 53 examples
    assert Evaluator(tasks.recipe(eval_block=5), Placement(detect(8))).blocks.size == 5


@pytest.mark.parametrize("bytes_each, size", [(1 << 12, 25), (1 << 23, 8), (1 << 27, 3)])
def test_a_block_is_as_large_as_small_arrays_allow_and_at_least_a_replicas_batch(bytes_each, size):
    """Of 200 examples; a replica has three."""

    def loss(params, state, batch, key, train):
        made, state = tasks.plain_loss(params, state, batch, key, train)
        x = batch["x"].astype(np.float32)
        grid = jax.numpy.broadcast_to(x[:, :1], (x.shape[0], bytes_each // 4))
        made["big"] = cw.Sum.of(jax.numpy.max(grid, axis=1))
        return made, state

    made = tasks.recipe(task=tasks.task(loss=loss, eval=tasks.data(200, 1)))
    assert Evaluator(made, Placement(detect(1))).blocks.size == size


def test_a_block_that_does_not_fit_is_told(monkeypatch):
    evaluator = Evaluator(tasks.recipe(), Placement(detect(1)))

    def hopeless(self, model):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 9 bytes")

    monkeypatch.setattr(Evaluator, "_run", hopeless)
    with refused(cw.errors.DeviceError, "block-above-memory", block=7):
        evaluator(*map(evaluator.placement.gather, map(evaluator.placement.put, (PARAMS, STATE))))


def test_array_metrics_are_summed_and_divided_once():
    def loss(params, state, batch, key, train):
        made, state = tasks.plain_loss(params, state, batch, key, train)
        each = jax.nn.one_hot(batch["label"], tasks.CLASSES, dtype=np.float32)
        made["share"] = cw.Sum.of(each)
        return made, state

    metrics = evaluate(tasks.recipe(task=tasks.task(loss=loss)), PARAMS, STATE, batch=7, on=cw.On(devices=2))
    expected = np.bincount(tasks.data(EXAMPLES, 1).columns["label"], minlength=tasks.CLASSES) / EXAMPLES
    np.testing.assert_allclose(metrics["share"], expected, rtol=1e-6)


def draws(values, count):
    """A metric's `finish`: what each example drew."""
    return np.asarray(values)


def drawing(params, state, batch, key, train):
    """A loss with noise in evaluation too, as that of a diffusion net, and what it draws."""
    made, state = tasks.plain_loss(params, state, batch, key, train)
    drawn = jax.random.uniform(key, batch["label"].shape)
    noisy = cw.Sum.of(drawn * made["loss"].value)
    return {"loss": noisy, "drawn": cw.Sum.of_each(drawn, draws)}, state


def test_each_example_draws_its_own_and_the_same_at_every_evaluation(monkeypatch):
    source = tasks.data(500, 1)
    made = tasks.recipe(task=tasks.task(loss=drawing, eval=source), seed=3)
    evaluator = Evaluator(made, Placement(detect(1)))
    placed = [Placement(detect(1)).gather(Placement(detect(1)).put(tree)) for tree in (PARAMS, STATE)]
    first, second = evaluator(*placed), evaluator(*placed)
    assert first["loss"] == second["loss"] and (first["drawn"] == second["drawn"]).all()
    drawn = first["drawn"]
    assert len(set(drawn.tolist())) == 500
    # Uniform: within four standard errors of its mean and variance, and no example tells of the next one
    assert abs(drawn.mean() - 1 / 2) < 4 * (1 / 12 / 500) ** 0.5
    assert abs(drawn.var() - 1 / 12) < 4 * (1 / 180 / 500) ** 0.5
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4 / 500**0.5
    other = evaluate(dataclasses.replace(made, seed=4), PARAMS, STATE, on=cw.On(devices=1))["drawn"]
    assert abs(np.corrcoef(drawn, other)[0, 1]) < 4 / 500**0.5


@pytest.mark.slow
def test_draws_are_the_same_on_any_devices_for_any_batch_resident_and_streamed(monkeypatch):
    made = tasks.recipe(task=tasks.task(loss=drawing, eval=tasks.data(53, 1)), eval_block=4)
    alone = evaluate(made, PARAMS, STATE, on=cw.On(devices=1))

    def check(devices, batch=None):
        told = evaluate(made, PARAMS, STATE, batch=batch, on=cw.On(devices=devices))
        assert told["loss"] == alone["loss"] and told["drawn"].tolist() == alone["drawn"].tolist()

    check(3)
    check(8)
    monkeypatch.setattr("chipwise.run.feed.fits", lambda source, limit: False)
    for devices, batch in ((1, 7), (3, 1000), (8, 33)):
        check(devices, batch)


@pytest.mark.slow
def test_a_resumed_run_draws_what_an_unbroken_one_does(tmp_path):
    made = tasks.recipe(task=tasks.task(loss=drawing), duration="6st")
    whole = cw.fit(made, on=cw.On(devices=1), progress="none")
    cw.fit(made, tmp_path, on=cw.On(devices=1), progress="none", stop_after="3st")
    resumed = cw.fit(made, tmp_path, on=cw.On(devices=2), progress="none")
    assert resumed.metrics["eval/loss"] == whole.metrics["eval/loss"]


def test_nothing_to_evaluate_is_an_error():
    with refused(cw.errors.DataError, "no-evaluation-data"):
        evaluate(tasks.recipe(task=tasks.task(eval=None)), PARAMS, STATE)
    with refused(cw.errors.DataError, "evaluation-data-empty"):
        evaluate(tasks.recipe(task=tasks.task(eval=[])), PARAMS, STATE)


@pytest.mark.slow
def test_the_loss_of_a_diffusion_net_is_that_of_its_training():
    """DDPM (Ho et al., 2020) on digits: each image has noise of one of 100 levels, which a net finds."""
    data, levels, width = cw.datasets.digits(), 100, 128
    kept = jnp.cumprod(1 - jnp.linspace(1e-3, 0.1, levels, dtype=jnp.float32))

    def init(key):
        first, second = jax.random.split(key)
        return {
            "in": 0.1 * jax.random.normal(first, (65, width)),
            "out": 0.1 * jax.random.normal(second, (width, 64)),
        }, {}

    def loss(params, state, batch, key, train):
        count = batch["image"].shape[0]
        x = 2 * (batch["image"].reshape(count, 64).astype(jnp.float32) / 255) - 1
        of_level, of_noise = jax.random.split(key)
        level = jax.random.randint(of_level, (count,), 0, levels)
        noise = jax.random.normal(of_noise, x.shape)
        share = kept[level][:, None]
        noisy = jnp.sqrt(share) * x + jnp.sqrt(1 - share) * noise
        given = jnp.concatenate([noisy, level[:, None].astype(jnp.float32) / levels], axis=1)
        found = jax.nn.relu(given @ params["in"]) @ params["out"]
        return {"loss": cw.Sum.of(jnp.mean((found - noise) ** 2, axis=1))}, state

    task = cw.Task(init=init, loss=loss, train=data.train, eval=data.eval)
    for seed in (0, 1, 2):
        made = cw.Recipe(task=task, batch=64, duration="20ep", optimizer=cw.adamw(lr=0.003), seed=seed)
        told = cw.fit(made, on=cw.On(devices=1), progress="none").metrics
        assert told["eval/loss"] == pytest.approx(told["train/loss"], rel=0.15)


# ---- groups


def comparing(params, state, batch, key, train):
    """A loss that compares the examples of its batch, how many it saw, and what each drew."""
    logits = tasks.plain_logits(params, batch)
    count = logits.shape[0]
    near = jax.nn.log_softmax(logits @ logits.T, axis=1)
    return {
        "loss": cw.Sum.of(-jnp.diagonal(near)),
        "seen": cw.Sum.of(jnp.full(count, float(count))),
        "label": cw.Sum.of_each(batch["label"], draws),
        "drawn": cw.Sum.of_each(jax.random.uniform(key, (count,)), draws),
    }, state


def in_groups(examples, group, **changes):
    source = tasks.data(examples, 1)
    return tasks.recipe(task=tasks.task(loss=comparing, eval=source, eval_group=group), **changes)


def plain(metrics):
    return {name: np.asarray(value).tolist() for name, value in metrics.items()}


SIZES = [
    (9, 4),
    *(pytest.param(*s, marks=pytest.mark.slow) for s in ((7, 8), (8, 8), (9, 8), (53, 8), (53, 1))),
]


@pytest.mark.parametrize("examples, group", SIZES)
def test_the_loss_gets_each_group_whole_and_the_rest_as_a_smaller_one(examples, group):
    made = in_groups(examples, group)
    found = evaluate(made, PARAMS, STATE, on=cw.On(devices=1))
    columns, losses, seen = made.task.eval.columns, [], []
    for start in range(0, examples, group):
        batch = {name: column[start : start + group] for name, column in columns.items()}
        sums, _ = comparing(PARAMS, STATE, batch, jax.random.key(0), False)
        losses.append(float(sums["loss"].total))
        seen += [len(batch["label"])] * len(batch["label"])
    assert found["loss"] == pytest.approx(sum(losses) / examples, rel=1e-6)
    assert found["seen"] == sum(seen) / examples
    assert found["label"].tolist() == columns["label"].tolist()
    assert len(set(found["drawn"].tolist())) == examples


@pytest.mark.slow
@pytest.mark.drawn(share=0.25)
@pytest.mark.parametrize("examples, group", [(9, 4), *SIZES[1:-1]])
def test_groups_have_the_same_bits_on_any_devices_for_any_batch_resident_and_streamed(
    examples, group, monkeypatch
):
    made = in_groups(examples, group, eval_block=3)
    alone = plain(evaluate(made, PARAMS, STATE, on=cw.On(devices=1)))
    for devices in (3, 8):
        assert plain(evaluate(made, PARAMS, STATE, on=cw.On(devices=devices))) == alone
    monkeypatch.setattr("chipwise.run.feed.fits", lambda source, limit: False)
    for devices, batch in ((1, 7), (8, 33)):
        assert plain(evaluate(made, PARAMS, STATE, batch=batch, on=cw.On(devices=devices))) == alone


@pytest.mark.parametrize("group, size", [(1, 7), (4, 8), (8, 8), (52, 52), (53, 53), (54, 53), (1000, 53)])
def test_a_block_holds_whole_groups(group, size):
    assert Evaluator(in_groups(53, group), Placement(detect(1))).blocks.size == size


def test_another_group_is_another_evaluation():
    def digest(group):
        return Evaluator(in_groups(53, group), Placement(detect(1))).computes.digest

    assert len({digest(1), digest(2), digest(4)}) == 3
    described = [in_groups(53, group).describe() for group in (1, 2)]
    assert difference(*described) == [("task.eval_group", None, 2)]
    assert ("eval_group", "2") in in_groups(53, 2).rows()


@pytest.mark.parametrize("group", [0, -1, 1.0, True, "4", None])
def test_a_group_is_a_whole_number_of_examples(group):
    code = "eval-group" if type(group) is int else "wrong-kind"
    with refused(cw.errors.RecipeError, code, eval_group=group):
        tasks.task(eval_group=group)
