import pytest

import chipwise as cw
import tasks
from chipwise.recipe.recipe import difference


def test_unknown_and_missing_fields_are_named_with_the_nearest():
    with pytest.raises(cw.RecipeError, match=r"no field 'batch_size'\. Did you mean 'batch'\?"):
        tasks.recipe(batch_size=64)
    with pytest.raises(cw.RecipeError, match=r"needs optimizer, for example optimizer=cw\.sgd"):
        cw.Recipe(task=tasks.task(), batch=8, duration="1ep")


@pytest.mark.parametrize(
    "changes,expected",
    [
        ({"batch": 0}, "batch=0"),
        ({"batch": 2.5}, "batch=2.5"),
        ({"batch": True}, "batch=True"),
        ({"replicas": 0}, "replicas=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "2\\^32"),
        ({"ema": 1.0}, "ema=1.0"),
        ({"precision": "fp16"}, 'precision="bf16"'),
        ({"precision": "float32"}, "Did you mean 'f32'"),
        ({"duration": "5%"}, "share of itself"),
        ({"duration": "5 parsecs"}, "parsecs"),
        ({"task": 3}, "cw.Task"),
        ({"optimizer": "sgd"}, "cw.sgd"),
    ],
)
def test_values_out_of_range_are_refused(changes, expected):
    with pytest.raises(cw.RecipeError, match=expected):
        tasks.recipe(**changes)


def test_empty_training_data_is_refused():
    with pytest.raises(cw.DataError, match="empty"):
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


def test_the_table_does_the_arithmetic():
    rows = dict(tasks.recipe().rows())
    assert rows["batch"] == "24 = 8 replicas × 3"
    assert rows["duration"] == "30st = 30 steps (4.208 an epoch)"


@pytest.mark.parametrize("name", ["init", "loss"])
def test_a_task_needs_functions_and_sources(name):
    with pytest.raises(cw.RecipeError, match=f"Task.{name} must be a function"):
        tasks.task(**{name: 3})
    with pytest.raises(cw.RecipeError, match=r"cw\.Arrays"):
        tasks.task(train=3)
