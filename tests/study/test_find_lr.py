"""The learning-rate finder on small tasks: what it runs, what it returns, what it leaves alone."""

import dataclasses
import json
import math
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import chipwise as cw
import tasks
from chipwise.engine.on import On
from chipwise.explain.find_picture import draw
from chipwise.study import range_test
from chipwise.study.find_lr import RangeTest, axis, choose, find_lr
from chipwise.study.range_test import read
from chipwise.words.facts import fact
from refusals import refused

STEPS = 30  # as many as `tasks.recipe` has: the tests of the step then share their compiled programs


@pytest.fixture(scope="module")
def found():
    return find_lr(tasks.recipe(), steps=STEPS, on=On(devices=1))


def plain(optimizer, **changes):
    task = tasks.task(loss=tasks.plain_loss, augment=None)
    return tasks.recipe(**{"task": task, "optimizer": optimizer, "batch": 16, "replicas": 2, **changes})


def poisoned(after):
    """A task whose loss is NaN from the step on before which there were `after`."""

    def loss(params, state, batch, key, train):
        made, _ = tasks.plain_loss(params, state, batch, key, train)
        bad = jnp.where(state["calls"] >= after, jnp.float32(jnp.nan), jnp.float32(1))
        counted = {**state, "calls": state["calls"] + jnp.int32(1)}
        return {"loss": cw.Sum(made["loss"].total * bad, made["loss"].count)}, counted

    return plain(cw.sgd(lr=0.1), task=tasks.task(loss=loss, augment=None), batch=8, replicas=1)


def test_the_curve_is_that_of_the_step(found):
    """Step by step, with a wait at each: the losses that training itself reports."""
    recipe = range_test.tested(tasks.recipe(), 1e-5, 10.0, STEPS)
    expected = []
    with cw.Stepper(recipe, on=cw.On(devices=1)) as stepper:
        for _ in range(len(found.curve.losses)):
            stepper.step()
            expected.append(stepper.metrics()["loss"])
    assert found.curve.losses.tolist() == expected
    assert found.curve.rates[0] == pytest.approx(1e-5) and len(found.curve.rates) == len(found.curve.losses)
    ratios = found.curve.rates[1:] / found.curve.rates[:-1]
    np.testing.assert_allclose(ratios, 1e6 ** (1 / (STEPS - 1)), rtol=1e-5)


def test_neither_feed_nor_delay_changes_a_bit(found, monkeypatch):
    monkeypatch.setattr(range_test, "BEHIND", 2)
    again = find_lr(tasks.recipe(), steps=STEPS, on=On(devices=1, feed="host"))
    assert again.to_json() == found.to_json()


@pytest.mark.slow
def test_one_and_eight_devices_give_the_same_bits(found):
    eight = find_lr(tasks.recipe(), steps=STEPS, on=On(devices=8))
    assert eight.devices["count"] == 8 and found.devices["count"] == 1
    assert eight.curve.losses.tobytes() == found.curve.losses.tobytes()
    assert (eight.suggestion, eight.valley, eight.steep) == (found.suggestion, found.valley, found.steep)


def test_the_callers_recipe_and_data_stay_what_they_were(found):
    recipe = tasks.recipe()
    before = recipe.describe()
    columns = {name: column.copy() for name, column in recipe.task.train.columns.items()}
    search = find_lr(recipe, steps=STEPS, on=On(devices=1))
    assert search.old is recipe and recipe.describe() == before
    assert all((columns[name] == column).all() for name, column in recipe.task.train.columns.items())


def test_the_found_rate_becomes_the_peak_of_the_same_schedule(found):
    new = found.recipe
    peak = float(f"{found.suggestion:.2g}")
    assert new.optimizer == dataclasses.replace(found.old.optimizer, lr=cw.one_cycle(peak, warmup="20%"))
    same = dataclasses.replace(found.old, optimizer=new.optimizer)
    assert dataclasses.replace(new, validated=None) == same
    assert found.own_peak == 0.02


def test_check_measures_from_the_found_rate_where_a_sweep_says_anything(found):
    old = tasks.recipe(validated=cw.recipe.Validated(source="elsewhere"))
    curve = dataclasses.replace(found.curve, suggestion=0.9, fell=True)

    def searched(fell):
        test = dataclasses.replace(found.test, curve=dataclasses.replace(curve, fell=fell))
        return dataclasses.replace(found, old=old, tests=(test,)).recipe

    def rates(recipe):
        return [f.given for f in cw.check(recipe) if f.given.startswith("peak lr=")]

    assert rates(searched(True)) == [] and "find-lr" in searched(True).validated.source
    assert rates(searched(False)) == ["peak lr=0.9 at batch 24"]
    assert searched(False).validated.source == "elsewhere"


def test_progress_is_on_standard_error_and_can_be_left_out(capfd):
    recipe = plain(cw.sgd(lr=0.1))
    find_lr(recipe, steps=10, on=On(devices=1), second="momentum", values=[0.5, 0.9])
    said = capfd.readouterr()
    second = str(fact("range-test-of-several", number=2, count=2, name="momentum=0.9"))
    assert said.out == "" and second in said.err and "step 10/10" in said.err
    find_lr(recipe, steps=10, on=On(devices=1), progress="none")
    assert capfd.readouterr() == ("", "")


def test_json_holds_finite_numbers_only(found):
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert told["schema"] == "chipwise.find_lr/1" and told["recipe"]["batch"] == 24
    (one,) = told["sweeps"]
    assert one["suggestion"] == told["suggestion"] == found.suggestion
    assert len(one["rates"]) == len(one["losses"]) == len(one["smoothed"]) == len(found.curve.losses)


def test_a_loss_that_becomes_nan_midway_ends_the_sweep_there():
    found = find_lr(poisoned(after=11), steps=30, on=On(devices=1))
    assert len(found.curve.losses) == 11
    assert found.stopped == fact("range-test-not-finite", step=12, steps=30, lr=found.stopped["lr"])
    assert (
        math.isfinite(found.suggestion) and found.curve.rates[0] <= found.suggestion <= found.curve.rates[10]
    )
    assert "loss-held-to-the-end" not in [doubt.code for doubt in found.curve.doubts]


def test_a_loss_that_is_nan_at_once_is_no_matter_of_rates():
    with refused(cw.errors.DivergedError, "loss-not-finite-at-once"):
        find_lr(poisoned(after=0), steps=STEPS, on=On(devices=1))


def test_a_loss_that_is_nan_after_one_step_gives_the_lowest_rate():
    found = find_lr(poisoned(after=1), steps=STEPS, on=On(devices=1))
    assert found.suggestion == found.curve.rates[0] and found.curve.doubts and found.stopped["step"] == 2


def test_all_sweeps_of_a_second_axis_share_one_compilation(caplog):
    recipe = plain(cw.sgd(lr=0.1, momentum=0.9, weight_decay=1e-4))
    one = find_lr(recipe, steps=12, on=On(devices=1))
    caplog.clear()
    jax.config.update("jax_log_compiles", True)  # not `jax.log_compiles()`, which counts in one thread
    try:
        three = find_lr(recipe, steps=12, on=On(devices=1), second="weight_decay", values=[1e-3, 0, 1e-4])
    finally:
        jax.config.update("jax_log_compiles", False)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Finished XLA compilation")]
    assert [sum(f"({name})" in text for text in said) for name in ("in_turn", "update")] == [1, 1], said
    assert [s.held["weight_decay"] for s in three.tests] == [0, 1e-4, 1e-3]
    assert three.tests[1].curve.losses.tolist() == one.curve.losses.tolist()
    assert three.tests[2].curve.losses.tolist() != one.curve.losses.tolist()


def test_a_momentum_of_zero_is_plain_descent():
    found = find_lr(plain(cw.sgd(lr=0.1)), steps=12, on=On(devices=1), second="momentum", values=[0, 0.9])
    without = find_lr(plain(cw.sgd(lr=0.1, momentum=0)), steps=12, on=On(devices=1))
    assert found.tests[0].curve.losses.tolist() == without.curve.losses.tolist()


@pytest.mark.parametrize(
    "optimizer, second, values",
    [
        (cw.sgd(lr=0.1), "momentum", [0.8, 0.9, 0.95]),
        (cw.sgd(lr=0.1, momentum=0), "momentum", [0, 0.5, 0.9]),
        (cw.sgd(lr=0.1), "weight_decay", [0, 1e-5, 1e-4, 1e-3]),
        (cw.adam(lr=0.1), "b1", [0.8, 0.9, 0.95]),
        (cw.adamw(lr=cw.schedules.cosine(0.1), weight_decay=0.03), "weight_decay", [0.01, 0.03, 0.09]),
    ],
)
def test_the_second_axis_is_swept_around_the_recipes_own(optimizer, second, values):
    assert axis(plain(optimizer), second) == pytest.approx(values)


def test_a_pair_for_an_optimizer_of_optax():
    recipe = plain(cw.from_optax(optax.lion, learning_rate=cw.schedules.cosine(1e-3), b1=0.8))
    found = find_lr(recipe, steps=10, on=On(devices=1), second="b1", values=[0.5, 0.7])
    new = found.recipe.optimizer.hyper
    assert found.test.held["b1"] in (0.5, 0.7) and new["b1"] == cw.schedules.constant(found.test.held["b1"])
    assert new["learning_rate"] == cw.schedules.cosine(float(f"{found.suggestion:.2g}")) and found.why[
        "name"
    ].startswith("b1=")


def made_up(value, lowest, breaks):
    """A made-up test that falls from 2 to `lowest` at 1e-2 and leaves it at the rate `breaks`."""
    rates = np.geomspace(1e-5, 10.0, 100)
    points = [-5.0, -3.0, -2.0, math.log10(breaks), 1.0]
    losses = np.interp(np.log10(rates), points, [2.0, 2.0, lowest, lowest, 9.0])
    return RangeTest({"momentum": value}, read(rates, losses), None)


def test_the_lowest_sweep_wins_and_of_as_low_ones_the_most_stable():
    one, two, three = made_up(0.8, 0.5, 0.3), made_up(0.9, 0.52, 1.0), made_up(0.95, 1.0, 3.0)
    chosen, why = choose([one, two, three])
    assert chosen == 1 and (why.code, why["others"]) == ("as-low-and-stable", ["momentum=0.8"]) and str(why)
    chosen, why = choose([one, three])
    assert chosen == 0 and (why.code, why["name"]) == ("lowest-loss", "momentum=0.8")
    assert why["loss"] == pytest.approx(0.5, abs=0.05) and choose([one])[1].code == "one-range-test"


def test_a_scheduled_setting_is_held_where_the_rate_is_highest_and_set_there():
    optimizer = cw.sgd(
        lr=cw.one_cycle(0.1, warmup="20%"), momentum=cw.schedules.one_cycle_momentum(0.95, 0.85, warmup="20%")
    )
    recipe = plain(optimizer)
    held = range_test.tested(recipe, 1e-4, 1.0, 10).optimizer.hyper["momentum"]
    assert held.value == pytest.approx(0.85)
    found = find_lr(recipe, steps=10, on=On(devices=1), second="momentum", values=[0.425])
    assert found.recipe.optimizer.momentum == cw.schedules.one_cycle_momentum(0.475, 0.425, warmup="20%")
    own = find_lr(recipe, steps=10, on=On(devices=1), second="momentum", values=[0.85])
    assert own.recipe.optimizer.momentum == optimizer.momentum and list(own.settings) == ["lr"]


@pytest.mark.parametrize(
    "changes, code, facts",
    [
        ({"low": 0.0}, "rate-not-above-zero", {"name": "low", "value": 0.0}),
        ({"high": math.nan}, "rate-not-above-zero", {"name": "high"}),
        ({"low": 1.0, "high": 1.0}, "rates-out-of-order", {"low": 1.0, "high": 1.0}),
        ({"steps": 9}, "range-test-steps", {"fewest": 10, "most": 2000}),
        ({"values": [1.0]}, "values-of-nothing", {}),
        ({"second": "momentun"}, "no-second-setting", {"hint": "momentum"}),
        ({"second": "lr"}, "no-second-setting", {"name": "lr"}),
        ({"second": "momentum", "values": [1.0]}, "second-out-of-range", {"value": 1.0}),
        ({"second": "weight_decay", "values": [-1.0]}, "second-out-of-range", {"value": -1.0}),
        ({"second": "weight_decay", "values": []}, "second-without-values", {}),
    ],
)
def test_what_cannot_be_tested_is_said_before_any_step(changes, code, facts):
    with refused(cw.errors.RecipeError, code, **facts):
        find_lr(plain(cw.sgd(lr=0.1)), on=cw.On(devices=1), **changes)


def test_adam_is_asked_for_its_momentum_by_name():
    with refused(cw.errors.RecipeError, "no-second-setting", optimizer="adam", hint="b1"):
        find_lr(plain(cw.adam(lr=0.1)), second="momentum")


def test_a_schedule_that_is_a_function_is_swept_but_not_set():
    found = find_lr(plain(cw.sgd(lr=lambda step: 0.1)), steps=10, on=On(devices=1))
    assert found.own_peak == pytest.approx(0.1)
    with refused(cw.errors.RecipeError, "schedule-without-peak"):
        _ = found.recipe


def test_pictures_are_written_whole_and_alike(found, tmp_path):
    svg = draw(found, tmp_path / "a.svg")
    text = svg.read_text()
    ET.fromstring(text)
    for shown in ("learning rate", "last stable", "suggestion", "valley", "own peak"):
        assert shown in text, shown
    assert draw(found, tmp_path / "b.svg").read_text() == text
    with refused(cw.errors.RecipeError, "picture-not-svg"):
        draw(found, tmp_path / "a.png")
    with refused(cw.errors.DataError, "picture-unwritable", option="--picture"):
        draw(found, svg / "inside.svg")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.svg", "b.svg"]


def test_a_second_axis_whose_schedule_is_zero_at_the_peak_is_refused_before_the_sweep():
    decay = cw.schedules.piecewise({"0st": 0.0, "20st": 1e-3})
    recipe = tasks.recipe(optimizer=cw.sgd(lr=cw.one_cycle(0.1, warmup="20%"), weight_decay=decay))
    with refused(cw.errors.RecipeError, "second-is-zero-at-peak", name="weight_decay"):
        find_lr(recipe, second="weight_decay", values=[1e-3], steps=10)
