"""Features of a model, computed once: in memory, or as a packed folder."""

import dataclasses

import jax
import numpy as np

import chipwise as cw
import tasks
from chipwise.engine import keys
from refusals import refused

ONE = cw.On(devices=1)


def body(**changes):
    def predict(params, state, inputs):
        return tasks.plain_logits(params, inputs)

    return dataclasses.replace(tasks.task(), predict=predict, **changes)


def test_features_and_labels_are_data():
    task, data = body(), tasks.data(53, 1)
    made = cw.deploy.features(task, data, on=ONE, seed=2)
    assert made.spec["feature"].shape == (tasks.CLASSES,) and set(made.spec) == {"feature", "label"}
    np.testing.assert_array_equal(made.columns["label"], data.columns["label"])
    params = tasks.init(keys.init_key(2))[0]
    expected = tasks.plain_logits(params, {"x": data.columns["x"]})
    np.testing.assert_allclose(made.columns["feature"], expected, rtol=1e-5, atol=1e-6)


def test_a_folder_holds_what_memory_would(tmp_path):
    data = tasks.data(53, 1)
    made = cw.deploy.features(body(), data, tmp_path / "f", on=ONE)
    memory = cw.deploy.features(body(), data, on=ONE)
    again = cw.PackedFolder(tmp_path / "f", "train")
    np.testing.assert_array_equal(again.take(np.arange(53))["feature"], memory.columns["feature"])
    assert made.path == again.path and set(made.spec) == {"feature", "label"}
    cw.deploy.features(body(), tasks.data(7), tmp_path / "f", split="eval", on=ONE)
    with refused(cw.errors.DataError, "pack-exists", folder=tmp_path / "f" / "train"):
        cw.deploy.features(body(), data, tmp_path / "f", on=ONE)


def test_the_parameters_are_those_that_training_starts_with():
    """Among them what the task makes of its data."""
    data = tasks.data(17, 1)
    made = np.asarray(np.random.default_rng(4).normal(size=(tasks.FEATURES, 16)), np.float32)
    found = cw.deploy.features(body(from_data=lambda train: {"w": made * len(train)}), data, on=ONE)
    params = {**tasks.init(keys.init_key(0))[0], "w": made * len(tasks.data())}
    expected = tasks.plain_logits(params, {"x": data.columns["x"]})
    np.testing.assert_allclose(found.columns["feature"], expected, rtol=1e-5, atol=1e-6)


def test_a_head_trains_on_them():
    def init(key):
        return {"w": jax.numpy.zeros((tasks.CLASSES, tasks.CLASSES))}, {}

    def loss(params, state, batch, key, train):
        values = cw.losses.softmax_cross_entropy(batch["feature"] @ params["w"], batch["label"])
        return {"loss": cw.Sum.of(values)}, state

    train = cw.deploy.features(body(), tasks.data(64), on=ONE)
    recipe = tasks.recipe(task=cw.Task(init=init, loss=loss, train=train), batch=16, duration="3st")
    assert cw.fit(recipe, on=ONE, progress="none").metrics["train/loss"] < np.log(tasks.CLASSES)


def test_the_same_bits_on_1_2_4_and_8_devices():
    found = [
        cw.deploy.features(body(), tasks.data(53), on=cw.On(devices=n)).columns["feature"]
        for n in (1, 2, 4, 8)
    ]
    assert all(np.array_equal(one, found[0]) for one in found)


def test_a_task_that_predicts_nothing():
    with refused(cw.errors.RecipeError, "task-without-predict"):
        cw.deploy.features(tasks.task(), tasks.data(8), on=ONE)
