"""A run that goes on with another run's optimizer: its state, recorded, at another rate or length."""

import json

import jax
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.base.errors import DataError, RecipeError
from chipwise.run.folder.checkpoint import flatten, restore_run
from refusals import refused

pytestmark = pytest.mark.slow

ONE = {"on": cw.On(devices=1), "progress": "none", "eval_every": None}


def recipe(duration="6st", lr=0.02, **changes):
    return tasks.quick(duration=duration, optimizer=cw.adamw(lr=lr, weight_decay=0.01), ema=0.9, **changes)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "run"
    cw.fit(recipe(), folder, **ONE)
    return folder


def on(folder, made, optimizer=True):
    task = cw.pretrained(folder, optimizer=optimizer).start(made.task)
    return cw.recipe.Recipe(**{**{n: getattr(made, n) for n in made.__dataclass_fields__}, "task": task})


def test_the_whole_state_goes_on_at_step_0(first, tmp_path):
    before = flatten(restore_run(recipe(), first).whole)
    with cw.Stepper(on(first, recipe("9st", 0.01)), cw.On(devices=1)) as stepper:
        assert (stepper.done, stepper.total) == (0, 9)
        now = flatten(stepper._session.snapshot())
    for name, value in before.items():
        if name != "step" and not name.startswith("sums"):
            assert np.array_equal(value, now[name]), name
    going = cw.fit(on(first, recipe("9st", 0.01)), tmp_path / "on", **ONE)
    weights = cw.fit(on(first, recipe("9st", 0.01), optimizer=False), tmp_path / "weights", **ONE)
    assert going.steps == 9 and going.fingerprint != weights.fingerprint
    stored = json.loads((tmp_path / "on" / "recipe.json").read_text())
    other = json.loads((tmp_path / "weights" / "recipe.json").read_text())
    assert stored["task"]["init"] != other["task"]["init"] and " from weights " in stored["task"]["init"]
    three = cw.fit(on(first, recipe("9st", 0.01)), **{**ONE, "on": cw.On(devices=3)})
    assert three.fingerprint == going.fingerprint
    assert jax.tree.structure(three.params) == jax.tree.structure(going.params)


def test_a_stop_in_the_second_run_changes_nothing(first, tmp_path):
    whole = cw.fit(on(first, recipe("9st")), **ONE)
    cw.fit(on(first, recipe("9st")), tmp_path / "run", stop_after="4st", **ONE)
    assert cw.fit(on(first, recipe("9st")), tmp_path / "run", **ONE).fingerprint == whole.fingerprint


def test_another_optimizer_is_refused(first, tmp_path):
    other = tasks.quick(duration="6st", optimizer=cw.sgd(lr=0.1))
    with refused(RecipeError, "state-of-another-recipe"):
        cw.fit(on(first, other), **ONE)
    (tmp_path / "net.safetensors").write_bytes(b"x")
    with refused(DataError, "weights-without-optimizer"):
        cw.pretrained(tmp_path / "net.safetensors", optimizer=True)
