"""Plans to a goal at several batches, from one run."""

import dataclasses

import pytest

import chipwise as cw
from chipwise.base.prediction import Range
from chipwise.planner import plan_to_target
from chipwise.planner.plans import Cost, Plan
from chipwise.study.critical_batch import CriticalBatch
from chipwise.study.goal import Goal

LAW = CriticalBatch("run", Goal("eval/accuracy", 0.9, "higher"), 64, 100, 90, ((100, 256.0),))


@pytest.fixture
def asked(monkeypatch):
    """The recipes that are planned; a plan takes 1 ms a step."""
    seen = []

    def plan(recipe, on, **options):
        seen.append((recipe, options))
        seconds = Range(recipe.clock.total / 1e3, recipe.clock.total / 2e3, recipe.clock.total / 5e2)
        cost = Cost("gcp", "x", "us", 3600.0, seconds, False, "", "2026-01-01", "s")
        return [
            Plan(name, name, 1, 1, 1, "compiled", recipe.batch, 8, 8, "f32", 1, steps=recipe.clock.total,
                 wall_seconds=seconds, costs=(cost,)) for name in on
        ]  # fmt: skip

    monkeypatch.setattr(plan_to_target, "plan", plan)
    monkeypatch.setattr(
        plan_to_target,
        "critical_batch",
        lambda recipe, run, goal, better: dataclasses.replace(LAW, goal=Goal.parse(goal, better)),
    )
    return seen


def test_each_batch_runs_as_long_as_the_law_says(asked):
    recipe = cw.load("digits")
    made = cw.planner.plan_like(
        recipe, ["t4", "h100"], run="run", goal="eval/accuracy=0.9", batches=[64, 256], exact=False
    )
    assert [p.target for p in made] == ["t4 at 64", "h100 at 64", "t4 at 256", "h100 at 256"]
    assert [(r.batch, r.clock.total) for r, _ in asked] == [(64, 100), (256, LAW.steps(256).steps)]
    assert all(options == {"exact": False} for _, options in asked)
    steps = LAW.steps(256)
    wall = made[2].wall_seconds
    assert wall.value == pytest.approx(steps.steps / 1e3)
    assert (wall.low, wall.high) == pytest.approx((steps.low / 2e3, steps.high / 5e2))
    assert made[2].costs[0].usd == wall
    (about,) = [note for note in made[2].notes if note.code == "plan-like"]
    assert {name: about.numbers[name] for name in ("batch", "steps")} == {"batch": 256, "steps": steps.steps}
