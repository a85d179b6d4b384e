"""The learning-rate finder on small tasks: what it runs, what it returns, what it leaves alone."""

import dataclasses
import json
import math
import xml.etree.ElementTree as ET
from fractions import Fraction
from types import SimpleNamespace
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import chipwise as cw
import tasks
from chipwise.base.facts import fact
from chipwise.explain import advice, page
from chipwise.run.on import On
from chipwise.run.progress import Reporter
from chipwise.study.find_lr import MARKS, _losses, find_lr, swept
from refusals import refused

pytestmark = pytest.mark.as_users_compile

STEPS = 30  # as many as `tasks.recipe` has: the tests of the step then share their compiled programs


@pytest.fixture(scope="module")
def found():
    return find_lr(tasks.quick(), steps=STEPS, on=On(devices=1))


def plain(optimizer, **changes):
    task = tasks.quick_task(loss=tasks.plain_loss, augment=None)
    return tasks.quick(**{"task": task, "optimizer": optimizer, "batch": 16, "replicas": 2, **changes})


def poisoned(after):
    """A task whose loss is NaN from the step on before which there were `after`."""

    def loss(params, state, batch, key, train):
        made, _ = tasks.plain_loss(params, state, batch, key, train)
        bad = jnp.where(state["calls"] >= after, jnp.float32(jnp.nan), jnp.float32(1))
        counted = {**state, "calls": state["calls"] + jnp.int32(1)}
        return {"loss": cw.Sum(made["loss"].total * bad, made["loss"].count)}, counted

    return plain(cw.sgd(lr=0.1), task=tasks.quick_task(loss=loss, augment=None), batch=8, replicas=1)


def test_the_curve_is_that_of_the_step(found):
    """Step by step, with a wait at each: the losses that training itself reports."""
    recipe = swept(tasks.quick(), 1e-5, 10.0, STEPS)
    expected = []
    with cw.Stepper(recipe, on=cw.On(devices=1)) as stepper:
        for _ in range(len(found.curve.losses)):
            stepper.step()
            expected.append(stepper.metrics()["loss"])
    assert found.curve.losses.tolist() == expected
    assert found.curve.rates[0] == pytest.approx(1e-5) and len(found.curve.rates) == len(found.curve.losses)
    ratios = found.curve.rates[1:] / found.curve.rates[:-1]
    np.testing.assert_allclose(ratios, 1e6 ** (1 / (STEPS - 1)), rtol=1e-5)


def test_the_feed_changes_no_bit(found):
    again = find_lr(tasks.quick(), steps=STEPS, on=On(devices=1, feed="host"))
    assert again.to_json() == found.to_json()


@pytest.mark.slow
def test_one_and_eight_devices_give_the_same_bits(found):
    eight = find_lr(tasks.quick(), steps=STEPS, on=On(devices=8))
    assert eight.devices["count"] == 8 and found.devices["count"] == 1
    assert eight.curve.losses.tobytes() == found.curve.losses.tobytes()
    assert (eight.suggestion, eight.last_stable) == (found.suggestion, found.last_stable)


def test_the_callers_recipe_and_data_stay_what_they_were(found):
    recipe = tasks.quick()
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
    old = tasks.quick(validated=cw.recipe.Validated(source="elsewhere"))
    curve = dataclasses.replace(found.curve, suggestion=0.9, fell=True)

    def searched(fell):
        return dataclasses.replace(found, old=old, curve=dataclasses.replace(curve, fell=fell)).recipe

    def rates(recipe):
        return [f.given for f in cw.check(recipe) if f.given.startswith("peak lr=")]

    assert rates(searched(True)) == [] and "find-lr" in searched(True).validated.source
    assert rates(searched(False)) == ["peak lr=0.9 at batch 24"]
    assert searched(False).validated.source == "elsewhere"


def test_progress_is_on_standard_error_and_can_be_left_out(capfd):
    recipe = plain(cw.sgd(lr=0.1))
    find_lr(recipe, steps=10, on=On(devices=1))
    said = capfd.readouterr()
    begins = str(fact("range-test-begins", recipe=recipe.name, low=1e-5, high=10.0))
    assert said.out == "" and begins in said.err and "step 10/10" in said.err
    find_lr(recipe, steps=10, on=On(devices=1), progress="none")
    assert capfd.readouterr() == ("", "")


def test_json_holds_finite_numbers_only(found):
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert told["schema"] == "chipwise.find_lr/3" and told["recipe"]["batch"] == 24
    assert told["suggestion"] == found.suggestion
    assert len(told["rates"]) == len(told["losses"]) == len(told["smoothed"]) == len(found.curve.losses)


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


def test_an_optimizer_of_optax_gets_its_peak():
    recipe = plain(cw.from_optax(optax.lion, learning_rate=cw.schedules.cosine(1e-3), b1=0.8))
    found = find_lr(recipe, steps=10, on=On(devices=1))
    new = found.recipe.optimizer.hyper
    assert new["learning_rate"] == cw.schedules.cosine(float(f"{found.suggestion:.2g}"))
    assert new["b1"] == cw.schedules.constant(0.8) and list(found.settings) == ["learning_rate"]


def test_a_scheduled_setting_is_held_where_the_rate_is_highest():
    optimizer = cw.sgd(
        lr=cw.one_cycle(0.1, warmup="20%"), momentum=cw.one_cycle(0.85, "20%", start=0.95, end=0.95)
    )
    held = swept(plain(optimizer), 1e-4, 1.0, 10).optimizer.hyper["momentum"]
    assert held.value == pytest.approx(0.85)


@pytest.mark.parametrize(
    "changes, code, facts",
    [
        ({"low": 0.0}, "rate-not-above-zero", {"name": "low", "value": 0.0}),
        ({"high": math.nan}, "rate-not-above-zero", {"name": "high"}),
        ({"low": Fraction(1, 1000)}, "rate-not-above-zero", {"name": "low", "value": Fraction(1, 1000)}),
        ({"low": 1.0, "high": 1.0}, "rates-out-of-order", {"low": 1.0, "high": 1.0}),
        ({"steps": 9}, "range-test-steps", {"fewest": 10, "most": 2000}),
    ],
)
def test_what_cannot_be_tested_is_said_before_any_step(changes, code, facts):
    with refused(cw.errors.RecipeError, code, **facts):
        find_lr(plain(cw.sgd(lr=0.1)), on=cw.On(devices=1), **changes)


def test_a_schedule_that_is_a_function_is_swept_but_not_set():
    found = find_lr(plain(cw.sgd(lr=lambda step: 0.1)), steps=10, on=On(devices=1))
    assert found.own_peak == pytest.approx(0.1)
    with refused(cw.errors.RecipeError, "schedule-without-peak"):
        _ = found.recipe


def test_pictures_are_alike_and_printing_shows_tables(found):
    text = page.picture(advice.curves(found))
    ET.fromstring(text)
    assert text == page.picture(advice.curves(found))
    assert all(f"{mark.replace('_', ' ')} " in text for mark in MARKS) and "<svg" in text
    assert "<svg" in found._repr_html_() and "suggestion" in str(found)
    assert f"{found.suggestion:.3g}" in str(found) and "LrSearch" not in str(found)


def ended(losses):
    """The fact with which a test of these losses ends, and how many count."""
    left = iter(losses)
    session = SimpleNamespace(begin=Mock(), advance=Mock())
    session.drain = lambda: {"loss": cw.Sum(jnp.float32(next(left)), jnp.float32(1))}
    taken, why = _losses(session, [0.1] * len(losses), Reporter("none"))
    return why and why.code, len(taken)


def test_a_test_ends_where_the_loss_is_not_finite():
    for bad in (math.nan, math.inf, -math.inf):
        assert ended([2.0, 1.0, bad, 1.0]) == ("range-test-not-finite", 2)


def test_a_test_ends_at_four_times_its_best():
    assert ended([2.0] * 10 + [1.0] * 20 + [3.9] * 40) == (None, 70)
    why, taken = ended([2.0] * 10 + [1.0] * 20 + [5.0] * 40)
    assert why == "range-test-diverged" and 30 < taken < 50


def test_a_learned_task_that_wavers_has_not_diverged():
    assert ended([2.0] * 5 + [0.01, 0.2] * 20)[0] is None


def test_losses_below_zero_diverge_too():
    assert ended([1.0] * 5 + [-2.0] * 30 + [3.9] * 40)[0] is None
    assert ended([1.0] * 5 + [-2.0] * 30 + [9.0] * 40)[0] == "range-test-diverged"
