import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.machine.detect import detect
from chipwise.run.placement import Placement
from chipwise.run.predict import Predictor, inputs_of
from refusals import refused

pytestmark = pytest.mark.as_users_compile

PARAMS, STATE = jax.tree.map(np.asarray, tasks.init(jax.random.key(1)))


def predict(params, state, inputs):
    return tasks.plain_logits(params, inputs)


def recipe(**changes):
    return tasks.recipe(task=tasks.task(**{"predict": predict, "loss": tasks.plain_loss, **changes}))


def outputs(examples, devices=1, block=None, source=None, made=None, batch=None):
    source = source or tasks.data(examples, 1)
    predictor = Predictor(
        made or recipe(), PARAMS, STATE, source, Placement(detect(devices)), batch, block=block
    )
    beside, found = zip(*predictor(), strict=True)
    predictor.close()
    return {name: np.concatenate([part[name] for part in (*found,)]) for name in found[0]}, beside


@pytest.mark.slow
@pytest.mark.parametrize("examples", [1, 15, 16, 17, 53])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_every_example_once_and_in_order_with_the_same_bits_on_any_devices(examples, devices):
    found, beside = outputs(examples, devices, block=4)
    source = tasks.data(examples, 1)
    expected = np.asarray(predict(PARAMS, STATE, {"x": source.columns["x"]}))
    assert found["outputs"].shape == (examples, tasks.CLASSES)
    np.testing.assert_allclose(found["outputs"], expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(found["outputs"], outputs(examples, 1, block=4)[0]["outputs"])
    assert np.array_equal(np.concatenate([part["label"] for part in beside]), source.columns["label"])


def test_the_block_is_the_same_for_any_devices_and_not_larger_than_the_data():
    made = recipe()
    for devices in (1, 8):
        blocks = [
            Predictor(made, PARAMS, STATE, tasks.data(n, 1), Placement(detect(devices))).block
            for n in (1, 8, 9, 4000)
        ]
        assert blocks == [1, 1, 2, 256]


def test_outputs_have_the_same_bits_for_any_batch_that_is_read():
    whole = outputs(53, 2)[0]["outputs"]
    for devices, batch in ((1, 1), (1, 20), (2, 20), (3, 1000)):
        assert np.array_equal(outputs(53, devices, batch=batch)[0]["outputs"], whole)


def test_only_what_the_model_reads_is_asked_of_the_data():
    assert list(inputs_of(recipe())) == ["x"]
    extra = cw.Arrays(**tasks.data(53).columns, more=np.zeros((53, 3), np.float32))
    made = tasks.recipe(task=tasks.task(predict=predict, train=extra))
    assert list(inputs_of(made)) == ["x"]
    found, _ = outputs(9, source=cw.Arrays(x=tasks.data(9, 1).columns["x"]), made=made)
    assert found["outputs"].shape == (9, tasks.CLASSES)


def test_a_dictionary_of_outputs_and_bf16():
    def both(params, state, inputs):
        logits = tasks.plain_logits(params, inputs)
        return {"logits": logits, "best": jnp.argmax(logits, axis=1)}

    made = tasks.recipe(task=tasks.task(predict=both), precision="bf16")
    found, _ = outputs(9, made=made)
    assert (found["logits"].dtype, found["best"].shape) == (np.float32, (9,))
    assert np.array_equal(found["best"], found["logits"].argmax(1))


def test_what_cannot_be_predicted_is_refused():
    with refused(cw.errors.RecipeError, "task-without-predict"):
        inputs_of(tasks.recipe())
    with refused(cw.errors.RecipeError, "task-column", column="label"):
        inputs_of(recipe(predict=lambda params, state, inputs: inputs["label"]))
    with refused(cw.errors.RecipeError, "predict-returns", name="outputs", rows=4):
        outputs(9, block=4, made=recipe(predict=lambda p, s, inputs: jnp.sum(inputs["x"])))
    with refused(cw.errors.DataError, "predict-columns"):
        outputs(9, source=cw.Arrays(x=np.zeros((9, tasks.FEATURES), np.float32)))
    masked = np.ma.masked_all(tasks.FEATURES, np.uint8)
    with refused(cw.errors.DataError, "column-masked", column="x"):
        outputs(9, source=[tasks.data(1)[0]] * 8 + [{"x": masked, "label": 0}])
    with refused(cw.errors.RecipeError, "predict-batch-below-one", batch=0):
        Predictor(recipe(), PARAMS, STATE, tasks.data(9), Placement(detect(1)), 0)
    with refused(cw.errors.RecipeError, "wrong-kind", predict=3):
        tasks.task(predict=3)
    with refused(cw.errors.RecipeError, "class-names-number", value=2):
        tasks.task(classes=5, class_names=("a", "b"))
