"""What interruptions cost, by Daly's formulas, against runs that are played through."""

import dataclasses
import math

import numpy as np
import pytest

from chipwise.chips.targets import parse
from chipwise.errors import DeviceError
from chipwise.planner.interruptions import best_interval, interrupted, known, running, stated, unknown
from chipwise.planner.plans import Cost, Plan, Range
from refusals import refused


def play(steps, interval, save, restart, between, runs=10_000):
    """Seconds on the machine of so many runs, each with its own interruptions."""
    rng = np.random.default_rng(0)
    total, starting, done = np.zeros(runs), np.ones(runs, bool), 0.0
    while done < steps:
        stretch = min(interval, steps - done)
        left = np.arange(runs)
        while len(left):
            need = stretch + save + restart * starting[left]
            until = rng.exponential(between, len(left))
            total[left] += np.minimum(need, until)
            starting[left] = until < need
            left = left[until < need]
        done += stretch
    return total


@pytest.mark.parametrize(
    ("steps", "interval", "save", "restart", "between"),
    [
        (36_000, 900, 10, 60, 36_000),  # ten hours, one interruption
        (36_000, 700, 30, 300, 3_600),  # ten of them
        (5_000, 5_000, 100, 20, 2_000),  # saved at the end alone
        (7_000, 2_000, 5, 0, 1_000),  # the last stretch is shorter
    ],
)
def test_the_expected_time_is_that_of_ten_thousand_runs(steps, interval, save, restart, between):
    played = play(steps, interval, save, restart, between)
    error = played.std() / math.sqrt(len(played))
    assert abs(played.mean() - running(steps, interval, save, restart, between)) < 4 * error


@pytest.mark.parametrize("between", [300, 3_600, 360_000])
@pytest.mark.parametrize("save", [1, 20, 200])
def test_no_other_interval_is_much_better(save, between):
    steps = 1e6
    best = running(steps, best_interval(save, between), save, 100, between)
    for interval in np.geomspace(1, steps, 400):
        assert best < 1.02 * running(steps, float(interval), save, 100, between)


def test_where_nothing_is_interrupted_the_run_takes_its_time():
    assert running(1000, 100, 2, 30, 1e12) == pytest.approx(1000 + 10 * 2 + 30)
    assert running(1e6, 1e6, 1, 0, 1.0) == math.inf


@pytest.mark.parametrize(
    ("text", "hourly"), [("0.1/h", 0.1), ("2/d", 2 / 24), (" .5/h ", 0.5), ("1e-3/h", 1e-3)]
)
def test_a_rate_is_read(text, hourly):
    assert stated(text).per_hour.value == pytest.approx(hourly)


@pytest.mark.parametrize("text", ["", "0.1", "-1/h", "1/w", "nan/h", "1e999/h", "0.1/h/h"])
def test_what_is_no_rate_is_refused(text):
    with refused(DeviceError, "interruptions-unreadable", given=text):
        stated(text)


def test_published_rates_grow_with_the_machines():
    one, eight = (known(parse(name), "aws", False).per_hour.value for name in ("h100:8", "h100:64"))
    assert eight == pytest.approx(8 * one) and 0.5 < 2048 * 24 * 54 * one / 419 < 1.5  # Llama 3's own count
    assert known(parse("a100"), "gcp", True) is not None and known(parse("a100"), "aws", True) is None


PLAN = Plan(
    target="h100:16", chip="H100", chips=16, devices=16, devices_found=16, method="compiled", batch=64,
    replicas=16, replicas_per_device=1, precision="bf16", parameters=1,
    step_seconds=Range(0.1, 0.08, 0.13), wall_seconds=Range(36_100, 29_000, 47_000),
    seconds={"start": 5.0, "compile": 95.0, "train": 35_000.0, "evaluate": 1_000.0},
    overhead_seconds=(30.0, 300.0),
    costs=(
        Cost("aws", "p5", "us", 80.0, Range(1, 1, 1), False, "whole VM", "2026-01-01", ""),
        Cost("aws", "p5", "us", 30.0, Range(1, 1, 1), True, "whole VM", "2026-01-01", ""),
    ),
)  # fmt: skip


def test_a_plan_on_spot_takes_longer_and_says_how_often_to_save():
    target, rate = parse("h100:16"), stated("0.5/h")
    found = interrupted(PLAN, target, 10**10, True, rate)
    assert (
        found.wall_seconds.low < PLAN.wall_seconds.value < found.wall_seconds.value < found.wall_seconds.high
    )
    assert found.expected == pytest.approx(found.usd.value / 30.0 * 0.5)
    assert found.interval_steps == round(best_interval(found.save_seconds, 7200) / 0.1)
    rare = interrupted(PLAN, target, 10**10, True, stated("0.01/h"))
    assert rare.wall_seconds.value < found.wall_seconds.value and rare.interval_steps > found.interval_steps
    assert found.told.code == "plan-on-spot" and str(found.told)
    never = interrupted(PLAN, target, 10**10, True, stated("1e6/h"))
    assert never.told.code == "plan-never-ends" and math.isfinite(never.wall_seconds.high)
    assert math.isfinite(never.expected) and math.isfinite(never.usd.high)


def test_failures_of_several_machines_are_counted_unasked():
    found = interrupted(PLAN, parse("h100:16"), 10**10, False, None)
    assert not found.spot and found.usd.value / 80 == pytest.approx(10, rel=0.05)
    assert interrupted(PLAN, parse("h100:8"), 10**10, False, None) is None
    assert interrupted(PLAN, parse("h100:16"), 10**10, True, None) is None  # of aws nothing is published
    assert [one.code for one in unknown(PLAN, True)] == ["plan-spot-unknown"] and not unknown(PLAN, False)
    none = dataclasses.replace(PLAN, costs=())
    assert interrupted(none, parse("h100:16"), 10**10, False, None).told.code == "plan-with-failures-unpriced"
