"""Steps at another batch, by the law of the noise scale."""

import math

import pytest

import chipwise as cw
import tasks
from chipwise.run.noise import SCALE
from chipwise.study.critical_batch import FACTOR, REACH, SEEDS, critical_batch, of_rows
from chipwise.study.goal import Goal
from refusals import refused

GOAL = Goal("eval/loss", 0.5, "lower")


def rows(scales, each=10, reached=3):
    """A row of `each` steps for a scale; the goal is reached at row `reached`."""
    return [
        {"step": each * (i + 1), SCALE: scale, "eval/loss": 1.0 if i + 1 < reached else 0.4}
        for i, scale in enumerate(scales)
    ]


def test_a_constant_scale_gives_the_papers_law():
    law = of_rows("run", rows([100.0] * 5), 50, GOAL)
    assert (law.step, law.before, sum(n for n, _ in law.scales)) == (30, 20, 30)
    assert law.examples == pytest.approx(100)
    least = 30 / (1 + 100 / 50)
    for batch in (7, 50, 100, 400):
        assert law.steps(batch).steps == math.ceil(least * (1 + 100 / batch) - 1e-9)
    own = law.steps(50)
    assert (own.low, own.steps, own.high) == (math.floor(20 / SEEDS), 30, math.ceil(30 * SEEDS))


def test_each_part_of_a_run_counts_with_its_own_scale():
    law = of_rows("run", rows([10.0, 40.0, 160.0]), 40, GOAL)
    expected = sum(10 * (1 + n / 160) / (1 + n / 40) for n in (10, 40, 160))
    found = law.steps(160)
    assert found.steps == math.ceil(expected) and found.examples == 160 * found.steps
    ends = [
        sum(10 * (1 + f * n / 160) / (1 + f * n / 40) for n in (10, 40, 160)) for f in (FACTOR, 1 / FACTOR)
    ]
    assert found.low == math.floor(min(ends) * 20 / 30 / SEEDS) and found.high == math.ceil(max(ends) * SEEDS)
    assert 10 < law.examples < 160


def test_rows_without_a_scale_and_after_the_goal():
    made = rows([100.0] * 6)
    made[0].pop(SCALE)
    law = of_rows("run", made, 50, GOAL)
    assert law.scales == ((20, 100.0), (10, 100.0))
    with refused(cw.errors.RecipeError, "like-without-noise", run="run"):
        of_rows("run", [{"step": 10, "eval/loss": 0.1}], 50, GOAL)


@pytest.mark.parametrize(("metric", "best"), [("eval/loss", 1.0), ("eval/f1", None)])
def test_a_goal_that_was_not_reached(metric, best):
    with refused(cw.errors.RecipeError, "like-not-reached", best=best):
        of_rows("run", rows([100.0] * 2), 50, Goal(metric, 0.5, "lower"))


@pytest.mark.parametrize("batch", [64 // REACH - 1, 64 * REACH + 1])
def test_it_does_not_reach_past_what_was_measured(batch):
    law = of_rows("run", rows([100.0] * 5), 64, GOAL)
    assert law.steps(64 // REACH).steps > 30 > law.steps(64 * REACH).steps
    with refused(cw.errors.RecipeError, "like-too-far", batch=batch, least=64 // REACH, most=64 * REACH):
        law.steps(batch)


@pytest.mark.slow
def test_a_run_and_its_recipe(tmp_path):
    recipe = tasks.recipe(duration="12st")
    options = {
        "on": cw.On(devices=1, noise=True),
        "progress": "none",
        "eval_every": "4st",
        "log_every": "2st",
    }
    result = cw.fit(recipe, tmp_path / "run", **options)
    law = critical_batch(recipe, tmp_path / "run", f"eval/loss={result.metrics['eval/loss'] + 1e-6!r}")
    assert law.batch == recipe.batch and 0 < law.step <= 12
    with refused(cw.errors.RecipeError, "like-other-task"):
        critical_batch(tasks.recipe(task=tasks.task(train=tasks.data(7))), tmp_path / "run", "eval/loss=0.5")
