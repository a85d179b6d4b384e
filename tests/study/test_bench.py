"""Measuring a training: what the record holds, and that it is the training of `fit`. No speed is asserted."""

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.data.synthetic import like
from chipwise.machine.record import read
from chipwise.study.bench import measure_train
from chipwise.study.timing import INTERVALS
from refusals import refused


def measured(recipe=None, **changes):
    arguments = {"steps": 12, "warmup": 8, "on": cw.On(devices=1), "progress": "none", **changes}
    return measure_train(tasks.recipe() if recipe is None else recipe, **arguments)


@pytest.fixture(scope="module")
def record():
    return measured(described={"set": ["lr=0.02"]})


def test_a_record_says_what_was_measured_and_survives_the_file(record, tmp_path):
    told = record.measured
    assert (record.kind, record.name, told["framework"]) == ("train", "recipe", "chipwise")
    assert told["recipe"] == tasks.recipe().describe() and told["set"] == ["lr=0.02"]
    assert (told["data"], told["data_note"]) == ("real", "")
    assert (told["batch"], told["replicas"], told["precision"], told["exact"]) == (24, 8, "f32", True)
    assert (told["devices"]["platform"], told["devices"]["count"]) == ("cpu", 1)
    assert told["parameters"] == 12 * 16 + 16 + 16 + 16 * 5
    assert told["timed_steps"] == 12 and len(told["first_losses"]) == 8
    assert told["warmup_steps"] == 8 + told["calibration_steps"] > 8
    assert set(told["seconds"]) == {"start", "compile", "warmup", "timed"}
    assert all(seconds > 0 for seconds in told["seconds"].values())
    assert told["wait_data_share"] == 0 and told["feed"]["data"] == "on the device"
    assert told["share_of_peak"] is None  # no peak is known of a CPU
    memory = told["memory_bytes_per_device"]
    assert (memory["parameters"], memory["optimizer"]) == (4 * 304, 2 * 4 * 304 + 4)
    assert memory["data"] > 101 * (12 + 4) and memory["temporaries"] > 0
    assert (memory["peak_measured"], memory["available"]) == (None, None)
    record.write(tmp_path / "r.json")
    assert read(tmp_path / "r.json") == record
    json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)


def test_a_run_of_the_series_is_an_interval(record):
    speed, examples = record.figures["steps_per_second"], record.figures["examples_per_second"]
    assert (speed.unit, examples.unit, record.measured["steps_per_interval"]) == ("steps/s", "examples/s", 1)
    assert len(speed.runs) == len(examples.runs) >= INTERVALS and min(speed.runs) > 0
    assert np.allclose(np.divide(examples.runs, speed.runs), 24)
    assert sum(1 / run for run in speed.runs) >= 0.9 * record.measured["seconds"]["timed"]


def losses_of_fit(recipe, **settings):
    history = cw.fit(
        recipe, on=cw.On(devices=1), log_every="1st", eval_every=None, progress="none", **settings
    ).history
    return [row["train/loss"] for row in history if "train/loss" in row]


def test_the_first_losses_are_those_of_fit(record):
    assert record.measured["first_losses"] == losses_of_fit(tasks.recipe(), stop_after="8st")


@pytest.mark.slow
def test_the_first_losses_are_the_same_on_any_number_of_devices():
    task = tasks.task(loss=tasks.plain_loss, augment=None, eval=None)  # quick to compile for two devices
    recipe = tasks.recipe(task=task, optimizer=cw.sgd(lr=0.1))
    one, two = (measured(recipe, on=cw.On(devices=n), steps=1).measured for n in (1, 2))
    assert (one["devices"]["count"], two["devices"]["count"]) == (1, 2)
    assert len(one["first_losses"]) == 8 and one["first_losses"] == two["first_losses"]


@pytest.mark.slow
def test_a_recipe_that_ends_first_goes_on(record):
    short = measured(tasks.recipe(duration="8st"), warmup=10)
    assert len(short.measured["first_losses"]) == 10 and short.measured["timed_steps"] == 12
    # Its schedule is eight steps long, of which a share is warm-up: another one than that of 30 steps.
    assert short.measured["first_losses"][1:8] != record.measured["first_losses"][1:8]
    assert short.measured["first_losses"][:8] == losses_of_fit(tasks.recipe(duration="8st"))


@pytest.mark.parametrize(
    "start, stop", [(0, 29), (0, 30), (0, 31), (28, 32), (29, 30), (30, 33), (1000, 1002)]
)
def test_schedules_hold_their_last_value(start, stop):
    recipe = tasks.recipe()
    own = recipe.optimizer.tables(recipe.clock)
    longer = recipe.endless()
    found = longer.optimizer.tables(longer.clock, start, stop)
    for name, values in own.items():
        expected = [values[min(step, 29)] for step in range(start, stop)]
        np.testing.assert_array_equal(found[name], np.asarray(expected, values.dtype))
    assert longer.optimizer.lr_name == "lr" and longer.optimizer.hyper.keys() == recipe.optimizer.hyper.keys()


@pytest.mark.slow
def test_streamed_data_is_the_same_training_and_its_waits_are_told(record):
    streamed = measured(on=cw.On(1, feed="host", workers=1))
    assert streamed.measured["first_losses"] == record.measured["first_losses"]
    waits = streamed.figures["wait_data_share"]
    assert len(waits.runs) == len(streamed.figures["steps_per_second"].runs)
    assert all(0 <= wait <= 1 for wait in waits.runs)
    assert streamed.measured["feed"]["data"] == "streamed"
    assert streamed.measured["feed"]["waited_seconds"] <= streamed.measured["seconds"]["timed"]


def test_made_up_data_keeps_the_name_of_the_recipe():
    task = tasks.task(train=like(tasks.data(), classes=tasks.CLASSES), eval=None)
    told = measured(tasks.recipe(task=task, name="mine-synthetic"), steps=1, warmup=1)
    assert (told.name, told.measured["data"]) == ("mine", "synthetic")


@pytest.mark.slow
def test_a_loss_that_is_not_finite_names_its_step():
    def loss(params, state, batch, key, train):
        metrics, after = tasks.loss(params, state, batch, key, train)
        bad = jnp.where(state["calls"] >= 3, jnp.nan, 0.0)
        total = metrics["loss"]
        return {**metrics, "loss": dataclasses.replace(total, total=total.total + bad)}, after

    recipe = tasks.recipe(task=tasks.task(loss=loss))
    with refused(cw.errors.DivergedError, "bench-loss-not-finite", value="nan", first=4, last=4):
        measured(recipe)


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"steps": 10**400}, {"warmup": 0}, {"seconds": 0}, {"seconds": math.inf}]
)
def test_what_cannot_be_measured_is_told(wrong):
    with refused(cw.errors.RecipeError, "bench-nothing-to-time", **wrong):
        measured(**wrong)


def test_a_recipe_of_no_steps_is_told():
    with refused(cw.errors.RecipeError, "recipe-without-steps", duration="0st"):
        measured(tasks.recipe(duration="0st", optimizer=cw.sgd(lr=0.1)))
