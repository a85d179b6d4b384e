import jax
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.engine.evaluate import Evaluator, evaluate
from chipwise.engine.placement import Placement
from chipwise.machine.detect import detect
from refusals import refused

PARAMS, STATE = jax.tree.map(np.asarray, tasks.init(jax.random.key(1)))
EXAMPLES = 53


def evaluated(batch, devices, source=None):
    task = tasks.task() if source is None else tasks.task(eval=source)
    return evaluate(tasks.recipe(task=task), PARAMS, STATE, batch=batch, on=cw.On(devices=devices))


def test_every_example_counts_once():
    metrics = evaluated(None, 8)
    made, _ = tasks.loss(PARAMS, STATE, tasks.data(EXAMPLES, 1).columns, None, False)
    assert metrics["accuracy"] * EXAMPLES == pytest.approx(float(made["accuracy"].total), abs=1e-9)
    assert metrics["loss"] == pytest.approx(float(made["loss"].value), rel=1e-5)


@pytest.mark.parametrize(
    "examples", [1, 7, 8, 9, 53, *(pytest.param(n, marks=pytest.mark.slow) for n in (15, 16, 17))]
)
def test_values_have_the_same_bits_on_any_devices_for_any_batch_resident_and_streamed(examples, monkeypatch):
    made = tasks.recipe(task=tasks.task(eval=tasks.data(examples, 1)), eval_block=4)
    alone = evaluate(made, PARAMS, STATE, on=cw.On(devices=1))
    for devices in (2, 3, 8):
        assert evaluate(made, PARAMS, STATE, on=cw.On(devices=devices)) == alone
    monkeypatch.setattr("chipwise.engine.feed.fits", lambda source, limit: False)
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


def test_nothing_to_evaluate_is_an_error():
    with refused(cw.errors.DataError, "no-evaluation-data"):
        evaluate(tasks.recipe(task=tasks.task(eval=None)), PARAMS, STATE)
    with refused(cw.errors.DataError, "evaluation-data-empty"):
        evaluate(tasks.recipe(task=tasks.task(eval=[])), PARAMS, STATE)
