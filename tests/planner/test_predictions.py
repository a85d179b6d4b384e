"""Plans of predictions: what they add up to, what is refused, how large a block is."""

import jax
import pytest

import chipwise as cw
import tasks
from chipwise.engine.predict import predicted_together
from chipwise.explain import plan_page
from chipwise.explain import plan_table as shown
from chipwise.planner import ask
from chipwise.planner.compile_answers import Compiled
from chipwise.planner.tracing import prediction_step
from chipwise.words.facts import fact
from compilers import no_gpu_compiler as no_gpu_compiler
from refusals import refused

EXAMPLES = 1_000_000


def predict(params, state, inputs):
    return tasks.plain_logits(params, inputs)


def recipe(**changes):
    return tasks.recipe(task=tasks.task(**{"predict": predict, "loss": tasks.plain_loss, **changes}))


@pytest.fixture(scope="module")
def plans(no_gpu_compiler):
    return cw.plan(recipe(), on=["t4", "a100:8"], predict=EXAMPLES)


def test_a_plan_of_predictions_adds_up(plans):
    for p, devices in zip(plans, (1, 8), strict=True):
        assert p.runs and p.predicts == EXAMPLES and p.devices == devices
        assert p.batch == devices * predicted_together(recipe(), EXAMPLES) and p.steps == -(
            -EXAMPLES // p.batch
        )
        assert p.examples_per_second.value == pytest.approx(p.batch / p.step_seconds.value)
        assert p.seconds["predict"] == pytest.approx(p.steps * p.step_seconds.value)
        assert p.wall_seconds.value == pytest.approx(sum(p.seconds.values()))
        assert p.latency_seconds.low < p.latency_seconds.value < p.latency_seconds.high
        assert (p.memory.optimizer, p.memory.replica_sums) == (0, 0) and p.memory.fits
        assert p.memory.parameters == 4 * p.parameters == 4 * (12 * 16 + 16 + 16 + 16 * tasks.CLASSES)


def test_a_million_cost_what_the_chip_is_rented_for(plans):
    t4 = plans[0]
    cost = t4.cheapest()
    hours = 1e6 / t4.examples_per_second.value / 3600
    assert t4.per_million(cost).value == pytest.approx(hours * cost.usd_per_hour)
    assert t4.to_json()["usd_per_million"][0]["value"] == pytest.approx(hours * cost.usd_per_hour)


def test_few_examples_make_a_small_block():
    (p,) = cw.plan(recipe(), on=["t4"], predict=17)
    assert (p.batch, p.steps) == (3, 6)


def test_a_latency_that_no_compiler_tells_is_not_told(monkeypatch):
    crash = fact("compiler-crashed", program="one", signal="SIGABRT", log="")
    answers = {"block": Compiled("block"), "one": Compiled("one", crash)}
    monkeypatch.setattr(ask, "compile_steps", lambda cases, **_: enumerate([answers]))
    (p,) = cw.plan(recipe(), on=["t4"], predict=EXAMPLES)
    assert p.runs and p.latency_seconds is None and fact("latency-unknown", problem=crash) in p.notes
    answers["block"] = Compiled("block", crash)
    (p,) = cw.plan(recipe(), on=["t4"], predict=EXAMPLES)
    assert p.problem == crash and p.latency_seconds is p.wall_seconds is None


def test_what_cannot_be_planned_is_refused():
    with refused(cw.errors.RecipeError, "plan-predicts-none", examples=0):
        cw.plan(recipe(), on=["t4"], predict=0)
    with refused(cw.errors.RecipeError, "plan-predict-training"):
        cw.plan(recipe(), on=["t4"], predict=5, find_largest_batch=True)
    with refused(cw.errors.RecipeError, "task-without-predict"):
        cw.plan(tasks.recipe(), on=["t4"], predict=5)


def test_a_page_and_a_table_tell_of_a_million(plans):
    document = shown.document(recipe(), plans)
    page = plan_page.render(document)
    assert "ms alone" in page and "ms a step" not in page
    assert shown.table(plans).row_count == 2
    alone = fact("plan-predicts-alone", target="x", seconds=1, low=1, high=1).code
    assert [told.code for told in shown.first(plans)].count(alone) == 1


def test_the_forward_program_has_no_gradient():
    programs = prediction_step(recipe(), 4)
    (params, _, _), made = programs.programs[0].specs, programs.programs[0]
    out = jax.eval_shape(made.function, *made.specs)
    assert out["outputs"].shape == (4, tasks.CLASSES) and programs.exchanges == {}
    assert programs.parameters == sum(x.size for x in jax.tree.leaves(params))
