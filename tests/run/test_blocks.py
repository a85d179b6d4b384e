"""Blocks: replicas that one program computes together, with the same bits on up to so many devices."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.base.facts import fact
from chipwise.run.on import On
from chipwise.run.session import Session
from chipwise.step.layout import Layout
from chipwise.step.state import first_state
from refusals import refused
from sessions import bits, run

pytestmark = pytest.mark.as_users_compile


@pytest.mark.parametrize(
    "made, replicas, blocks, counts",
    [
        (tasks.quick, 8, 2, (1, 2)),
        *(
            pytest.param(tasks.recipe, *n, marks=pytest.mark.slow)
            for n in ((8, 2, (1, 2)), (12, 6, (1, 6)), (8, 4, (1, 4)))
        ),
    ],
)
def test_the_same_bits_on_up_to_so_many_devices(made, replicas, blocks, counts):
    recipe = made(replicas=replicas, blocks=blocks, duration="8st", ema=0.9)
    first, *others = [bits(run(recipe, devices)) for devices in counts]
    assert all(other == first for other in others)
    if replicas > 8:  # once: blocks add in another order
        assert first != bits(run(dataclasses.replace(recipe, blocks=None), 1))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2])
def test_replicas_keep_what_they_mean(blocks):
    # Each its own batch-norm statistics, key and rows: the same step but for rounding
    apart = run(tasks.recipe(duration="1st", blocks=8), 1)
    together = run(tasks.recipe(duration="1st", blocks=blocks), 1)
    for a, b in zip(jax.tree.leaves(apart), jax.tree.leaves(together), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert together.state["calls"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("replicas, blocks", [(5, 1), (12, 4), (10, 2)])
def test_equal_state_stays_equal(replicas, blocks):
    def loss(params, state, batch, key, train):
        return tasks.plain_loss(params, state, batch, key, train)

    def init(key):
        params, _ = tasks.init(key)
        return params, {"kept": 0.1 * jax.random.normal(key, (200,))}

    task = tasks.task(init=init, loss=loss, augment=None)
    recipe = tasks.recipe(task=task, batch=60, replicas=replicas, blocks=blocks, duration="7st")
    np.testing.assert_array_equal(run(recipe, 1).state["kept"], first_state(recipe).state["kept"])


@pytest.mark.slow
def test_one_block_is_one_program_that_repeats_and_resumes(tmp_path):
    recipe = tasks.quick(blocks=1, duration="12st", task=tasks.quick_task(eval=None))
    whole = cw.fit(recipe, on=On(devices=1), progress="none")
    cw.fit(recipe, tmp_path / "run", on=On(devices=1), progress="none", stop_after="5st")
    resumed = cw.fit(recipe, tmp_path / "run", on=On(devices=1), progress="none")
    assert resumed.fingerprint == whole.fingerprint
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["blocks"] == 1


def test_as_many_blocks_as_replicas_is_the_default():
    plain, said = tasks.recipe(), tasks.recipe(blocks=8)
    assert "blocks" not in plain.describe() and plain.describe() == said.describe()
    assert tasks.recipe(replicas=4).block_count == 4


def test_layouts_count_blocks():
    layout = Layout(batch=64, replicas=8, devices=2, blocks=4)
    assert (layout.together, layout.blocks_per_device, layout.replicas_per_device) == (2, 2, 4)
    free = Layout(batch=64, replicas=8, devices=2, exact=False, blocks=1)
    assert (free.blocks, free.together, free.blocks_per_device) == (2, 4, 1)
    uneven = Layout(batch=12, replicas=6, devices=3, exact=False, blocks=2)  # a device has two replicas
    assert (uneven.blocks, uneven.together, uneven.blocks_per_device) == (6, 1, 2)
    accumulating = Layout(batch=64, replicas=8, devices=2, exact=False)
    assert (accumulating.together, accumulating.blocks_per_device) == (1, 4)


def test_what_is_refused_and_what_is_said(capsys):
    with refused(cw.errors.RecipeError, "blocks-indivisible", blocks=3, near=[1, 2, 4, 8]):
        tasks.recipe(blocks=3)
    with refused(cw.errors.RecipeError, "field-not-whole", what="blocks"):
        tasks.recipe(blocks=0)
    recipe = tasks.recipe(blocks=2)
    with refused(cw.errors.DeviceError, "devices-above-blocks", devices=4, blocks=2, most=2):
        Session(recipe, On(devices=4))
    with Session(recipe) as session:  # all that it can use
        assert session.layout.devices == 2
        assert [w.code for w in session.warnings] == ["devices-left"]
        assert session.start.code == "start-together"
    with Session(tasks.recipe(), On(devices=1)) as session:
        assert session.start.code == "start-in-turn"
        assert str(fact("start-in-turn", **session.start.numbers)) == str(session.start)


def test_settings_change_them():
    assert cw.load("digits", ["blocks=2"]).blocks == 2
    assert cw.load("digits", ["blocks=none"]).blocks is None
    with refused(cw.errors.RecipeError, "set-not-whole", name="blocks"):
        cw.load("digits", ["blocks=a few"])
    codes = [finding.code for finding in cw.check(cw.load("digits"), on="a100")]
    assert "blocks-in-turn" in codes
    assert "blocks-in-turn" not in [f.code for f in cw.check(cw.load("digits", ["blocks=1"]), on="a100")]
