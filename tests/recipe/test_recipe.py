import dataclasses
from types import SimpleNamespace

import pytest

import chipwise as cw
import tasks
from chipwise.recipe.recipe import difference
from refusals import refused


def test_unknown_and_missing_fields_are_named_with_the_nearest():
    with refused(cw.errors.RecipeError, "no-such-field", name="batchsize", near="batch"):
        tasks.recipe(batchsize=64)
    with refused(
        cw.errors.RecipeError, "fields-missing", names=["optimizer"], example="optimizer=cw.sgd(lr=0.1)"
    ):
        cw.Recipe(task=tasks.task(), batch=8, duration="1ep")


@pytest.mark.parametrize(
    "changes,code,facts",
    [
        ({"batch": 0}, "field-not-whole", {"batch": 0, "least": 1}),
        ({"batch": 2.5}, "wrong-kind", {"batch": 2.5}),
        ({"batch": True}, "wrong-kind", {"batch": True}),
        ({"replicas": 0}, "field-not-whole", {"what": "replicas"}),
        ({"name": "a\u2028b"}, "unprintable", {"what": "name"}),
        ({"seed": -1}, "field-not-whole", {"what": "seed", "least": 0}),
        ({"seed": 2**32}, "seed-too-large", {"seed": 2**32}),
        ({"ema": 1.0}, "ema-range", {"ema": 1.0}),
        ({"precision": "fp16"}, "precision-unknown", {"near": "f16"}),
        ({"precision": "float32"}, "precision-unknown", {"near": "f32"}),
        ({"duration": "5%"}, "duration-of-itself", {"duration": "5%"}),
        ({"duration": "5 parsecs"}, "duration-unreadable", {}),
        ({"task": 3}, "wrong-kind", {"task": 3}),
        ({"optimizer": "sgd"}, "wrong-kind", {"optimizer": "sgd"}),
    ],
)
def test_values_out_of_range_are_refused(changes, code, facts):
    with refused(cw.errors.RecipeError, code, **facts):
        tasks.recipe(**changes)


def test_empty_training_data_is_refused():
    with refused(cw.errors.DataError, "training-source-empty"):
        _ = tasks.recipe(task=tasks.task(train=[])).clock


@pytest.mark.parametrize(
    "duration,steps", [("1ep", 4), ("2ep", 8), ("30st", 30), ("101ex", 4), ("1ex", 1), ("0st", 0)]
)
def test_durations_become_steps(duration, steps):
    assert tasks.recipe(duration=duration).clock.total == steps


def test_a_description_is_plain_and_differences_are_listed():
    a, b = tasks.recipe().describe(), tasks.recipe(seed=9, optimizer=cw.adamw(lr=0.1)).describe()
    assert difference(a, a) == []
    changed = {name for name, _, _ in difference(a, b)}
    assert {"seed", "optimizer.lr"} <= changed
    assert "batch" not in changed
    moved = tasks.recipe()
    moved = dataclasses.replace(moved, optimizer=moved.optimizer.replace(lr=cw.one_cycle(0.2, warmup="20%")))
    assert difference(a, moved.describe()) == [("optimizer.lr.peak", a["optimizer"]["lr"]["peak"], 0.2)]


def test_the_table_does_the_arithmetic():
    rows = dict(tasks.recipe().rows())
    assert rows["batch"] == "24 = 8 replicas × 3"
    assert rows["  lr"] == repr(tasks.recipe().optimizer.lr)
    assert rows["duration"] == "30st = 30 steps (4.208 an epoch)"


@pytest.mark.parametrize("name", ["init", "loss"])
def test_a_task_needs_functions_and_sources(name):
    with refused(cw.errors.RecipeError, "wrong-kind", what=name, value=3):
        tasks.task(**{name: 3})
    loader = SimpleNamespace(dataset=tasks.data(), batch_sampler=None)  # what a DataLoader is known by
    with refused(cw.errors.RecipeError, "data-loader-given", name="train"):
        tasks.task(train=loader)
    batches = SimpleNamespace(use_multiprocessing=False, max_queue_size=10)  # and a PyDataset
    with refused(cw.errors.RecipeError, "py-dataset-given", name="train"):
        tasks.task(train=batches)
    with refused(cw.errors.RecipeError, "task-source-expected", name="train"):  # a dict of splits
        tasks.task(train={"train": tasks.data(8), "test": tasks.data(8)})
    with refused(cw.errors.RecipeError, "task-source-expected", name="train", value=3):
        tasks.task(train=3)
