import jax
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.engine.evaluate import Evaluator
from chipwise.engine.placement import Placement
from chipwise.machine.detect import detect
from refusals import refused

PARAMS, STATE = jax.tree.map(np.asarray, tasks.init(jax.random.key(1)))
EXAMPLES = 53


def evaluate(batch, devices, source=None):
    task = tasks.task() if source is None else tasks.task(eval=source)
    return cw.evaluate(tasks.recipe(task=task), PARAMS, STATE, batch=batch, on=cw.On(devices=devices))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("batch", [1, 7, 52, 53, 54, 1000, None])
def test_every_example_counts_once_whatever_the_batch_and_the_devices(batch, devices):
    metrics = evaluate(batch, devices)
    source = tasks.data(EXAMPLES, 1)
    made, _ = tasks.loss(PARAMS, STATE, source.columns, None, False)
    assert round(metrics["accuracy"] * EXAMPLES) == float(made["accuracy"].total)
    assert metrics["accuracy"] * EXAMPLES == pytest.approx(float(made["accuracy"].total), abs=1e-9)
    assert metrics["loss"] == pytest.approx(float(made["loss"].value), rel=1e-5)


def test_a_source_that_does_not_fit_is_streamed(monkeypatch):
    whole = evaluate(7, 2)
    monkeypatch.setattr("chipwise.engine.feed.fits", lambda source, limit: False)
    assert evaluate(7, 2) == whole


def recipe_needing(bytes_an_example):
    """A task whose evaluation holds a large temporary for each example."""

    def loss(params, state, batch, key, train):
        made, state = tasks.plain_loss(params, state, batch, key, train)
        if not train:
            x = batch["x"].astype(np.float32)
            grid = jax.numpy.broadcast_to(x[:, :1], (x.shape[0], bytes_an_example // 4))
            # Sorting needs the whole array at once: it cannot be fused away.
            made["big"] = cw.Sum.of(jax.numpy.sort(grid, axis=1)[:, 0])
        return made, state

    return tasks.recipe(task=tasks.task(loss=loss))


def test_the_batch_is_chosen_from_the_memory_the_program_needs():
    recipe = recipe_needing(1 << 16)
    placement = Placement(detect(1))
    roomy, tight = Evaluator(recipe, placement), Evaluator(recipe, placement, limit_bytes=8 << 16)
    a, b = roomy(PARAMS, STATE), tight(PARAMS, STATE)
    assert roomy.batch == EXAMPLES
    assert 1 <= tight.batch <= 8
    assert a["big"] == b["big"]


def test_running_out_of_memory_halves_the_batch(monkeypatch):
    recipe = tasks.recipe()
    placement = Placement(detect(1))
    evaluator = Evaluator(recipe, placement, batch=40)
    run = Evaluator._run

    def limited(self, params, state):
        if self.batch > 10:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 9 bytes")
        return run(self, params, state)

    monkeypatch.setattr(Evaluator, "_run", limited)
    assert evaluator(PARAMS, STATE) == Evaluator(recipe, placement, batch=10)(PARAMS, STATE)
    assert evaluator.batch == 10

    def hopeless(self, params, state):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 9 bytes")

    monkeypatch.setattr(Evaluator, "_run", hopeless)
    with refused(cw.DeviceError, "evaluation-above-memory"):
        evaluator(PARAMS, STATE)


def test_array_metrics_are_summed_and_divided_once():
    def loss(params, state, batch, key, train):
        made, state = tasks.plain_loss(params, state, batch, key, train)
        each = jax.nn.one_hot(batch["label"], tasks.CLASSES, dtype=np.float32)
        made["share"] = cw.Sum.of(each)
        return made, state

    metrics = cw.evaluate(
        tasks.recipe(task=tasks.task(loss=loss)), PARAMS, STATE, batch=7, on=cw.On(devices=2)
    )
    expected = np.bincount(tasks.data(EXAMPLES, 1).columns["label"], minlength=tasks.CLASSES) / EXAMPLES
    np.testing.assert_allclose(metrics["share"], expected, rtol=1e-6)


def test_nothing_to_evaluate_is_an_error():
    with refused(cw.DataError, "no-evaluation-data"):
        cw.evaluate(tasks.recipe(task=tasks.task(eval=None)), PARAMS, STATE)
    with refused(cw.DataError, "evaluation-data-empty"):
        cw.evaluate(tasks.recipe(task=tasks.task(eval=[])), PARAMS, STATE)
