"""Measured speeds beside plans."""

from types import SimpleNamespace

import pytest

import chipwise as cw
import tasks
from chipwise.base.facts import fact
from chipwise.base.prediction import Range
from chipwise.machine.record import Record, Series
from chipwise.planner import measured_share as module
from chipwise.planner.measured_share import MeasuredShare, causes, here, measured_share


def record(platform="gpu", chip="h100", count=1, speed=100.0, waited=0.0):
    devices = {"platform": platform, "kind": "a kind", "count": count}
    measured = {"devices": devices, "chip": chip, "exact": True, "wait_data_share": waited}
    return Record.now("train", "recipe", measured, {"steps_per_second": Series("steps/s", (speed,) * 3)})


def planned(monkeypatch, **changes):
    """Makes `plan` answer with a step of 8 to 12 ms, and returns what it is asked."""
    asked = []

    def plan(recipe, on, **more):
        asked.append((recipe, on, more))
        step = Range(0.01, 0.008, 0.012)
        value = {"target": on[0], "step_seconds": step, "bound": "memory", "problem": None} | changes
        return [SimpleNamespace(**value)]

    monkeypatch.setattr(module, "plan", plan)
    return asked


@pytest.mark.parametrize(
    "speed, share, slow", [(100.0, 1.0, False), (84.0, 0.84, False), (83.0, 0.83, True), (50.0, 0.5, True)]
)
def test_the_share_is_planned_over_measured_seconds(monkeypatch, speed, share, slow):
    asked = planned(monkeypatch)
    recipe = tasks.recipe()
    found = measured_share(recipe, record(speed=speed))
    assert found.share.value == pytest.approx(share) and found.share.high == pytest.approx(1.2 * share)
    assert (found.slow, found.fact.code) == (slow, "share-slow" if slow else "share-as-planned")
    ((of, on, more),) = asked
    assert of is recipe and on == ["h100"] and more["exact"] is True and more["measure_feed"] is False
    told = found.to_json()
    assert told["slow"] is slow and told["fact"]["code"] == found.fact.code


@pytest.mark.parametrize(
    "chip, count, target",
    [("h100", 1, "h100"), ("h100", 8, "h100:8"), ("v5e", 8, "v5e-8"), ("v3", 8, "v3-8"), ("v5e", 3, None)],
)
def test_the_target_is_the_machine_that_is_here(chip, count, target):
    assert getattr(here(chip, count), "name", None) == target


def test_an_unknown_chip_is_no_target():
    assert here(None, 1) is None


@pytest.mark.parametrize(
    "given, code",
    [
        ({"platform": "cpu", "chip": None}, "share-of-a-cpu"),
        ({"chip": None}, "share-of-no-target"),
        ({"chip": "v5e", "platform": "tpu", "count": 3}, "share-of-no-target"),
    ],
)
def test_where_there_is_no_plan_the_reason_is_said(monkeypatch, given, code):
    asked = planned(monkeypatch)
    found = measured_share(tasks.recipe(), record(**given))
    assert found.code == code and str(found) and not asked


def test_a_plan_that_fails_leaves_the_measurement(monkeypatch):
    planned(monkeypatch, problem=fact("share-of-a-cpu"), step_seconds=None)
    assert measured_share(tasks.recipe(), record()).code == "share-of-a-cpu"
    planned(monkeypatch, step_seconds=None)
    assert measured_share(tasks.recipe(), record()).code == "share-of-no-plan"

    def fails(*_, **__):
        raise cw.errors.RecipeError("recipe-without-steps", recipe="r", duration="0st")

    monkeypatch.setattr(module, "plan", fails)
    assert measured_share(tasks.recipe(), record()).code == "recipe-without-steps"
    assert measured_share(tasks.recipe(), record(count=12)).code == "gpu-count"  # no whole hosts


@pytest.mark.parametrize(
    "bound, waited, codes",
    [
        ("memory", 0.0, []),
        ("memory", 0.05, []),
        ("memory", 0.2, ["share-waited"]),
        ("launch", 0.0, ["share-launches"]),
    ],
)
def test_what_may_explain_it_is_named(bound, waited, codes):
    share = MeasuredShare("h100", Range(0.01, 0.008, 0.012), 0.02, bound)
    assert [one.code for one in causes(share, record(waited=waited))] == codes
    assert all(map(str, causes(share, record(waited=waited))))
