"""`examples/plan_tokens.py`: the programs that `generate` runs, timed, priced and weighed for absent chips"""

import json
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

import chipwise as cw
from chipwise.deploy.generation import decode_programs, lengths
from chipwise.engine.state import nbytes
from chipwise.errors import RecipeError
from compilers import no_gpu_compiler as no_gpu_compiler
from refusals import refused

PLANS = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "plan_tokens.py"))
RUN, plan_generation = PLANS["RUN"], PLANS["plan_generation"]
SIZES = {"depth": 2, "width": 32, "heads": 4, "context": 128, "vocabulary": 257}
SET = [f"{name}={value}" for name, value in SIZES.items()]


@pytest.fixture(scope="module")
def recipe():
    return cw.load("gpt2-124m", SET, synthetic=True)


@pytest.fixture(scope="module")
def plans(recipe, no_gpu_compiler):
    return plan_generation(recipe, ["t4", "a100:8"], prompt=40, tokens=20, rows=[1, 8])


def test_there_is_a_plan_for_each_number_of_texts_and_target(plans):
    assert [one.target for one in plans] == ["t4 at 1", "a100:8 at 1", "t4 at 8", "a100:8 at 8"]
    assert [one.batch for one in plans] == [1, 8, 8, 64]
    assert all(one.runs and one.ranked_by == "run" for one in plans)


def test_a_plan_adds_up(plans):
    for one in plans:
        block = one.step_parts["prefill"] + 20 * one.step_parts["token"]
        assert one.wall_seconds.value == pytest.approx(RUN * block / (20 * one.batch))
        assert one.examples_per_second.value == pytest.approx(20 * one.batch / block)
        assert one.step_seconds.value == one.step_parts["token"] < one.seconds["first_token"]
        assert one.step_seconds.low < one.step_seconds.value < one.step_seconds.high
        assert one.seconds["first_token"] == pytest.approx(sum(one.step_parts.values()))
        cost = one.cheapest()
        assert cost.usd.value == pytest.approx(one.wall_seconds.value * cost.usd_per_hour / 3600)


def test_eight_devices_write_eight_times_as_much(plans, recipe, no_gpu_compiler):
    (one,) = plan_generation(recipe, ["a100"], prompt=40, tokens=20)
    assert plans[-1].examples_per_second.value == pytest.approx(8 * one.examples_per_second.value)


def test_memory_is_weights_and_cache(plans, recipe):
    small, large = plans[0].memory, plans[2].memory
    weights = sum(x.size for x in jax.tree.leaves(jax.eval_shape(recipe.task.init, jax.random.key(0))[0]))
    assert small.parameters == large.parameters == 2 * weights  # in bfloat16, as they are computed with
    cache = 2 * SIZES["depth"] * 64 * SIZES["width"] * 2  # keys and values of 64 positions, in bfloat16
    assert large.state - small.state == pytest.approx(7 * cache, abs=64)
    assert small.optimizer == small.replica_sums == 0


def test_the_programs_are_those_that_generate_runs(recipe):
    step = PLANS["_block"](recipe, 40, 20, 2)
    params, state = recipe.task.init(jax.random.key(0))
    model = jax.eval_shape(lambda: (params, state))
    made = decode_programs(recipe, model, 2, *lengths(128, 40, 20), (np.float32(0.8), np.uint32(0)), 40)
    assert lengths(128, 40, 20) == (64, 64) and lengths(128, 100, 60) == (128, 128)
    assert [one.name for one in step.programs] == ["prefill", "token"]
    for one, (_, specs, _) in zip(step.programs, made, strict=True):
        assert [x.shape for x in jax.tree.leaves(one.specs)] == [x.shape for x in jax.tree.leaves(specs)]
    assert len(step.programs[1].donated) == len(jax.tree.leaves(made[1][1][1]))  # the cache
    assert nbytes(step.programs[1].specs[1]) <= step.state_bytes


def test_what_does_not_fit_is_said(recipe, no_gpu_compiler, monkeypatch):
    monkeypatch.setattr("chipwise.planner.device_memory.available", lambda target: (1000, None))
    (one,) = plan_generation(recipe, ["t4"], prompt=40, tokens=20)
    assert one.problem.code == "texts-do-not-fit" and one.wall_seconds is None and not one.costs


@pytest.mark.parametrize(
    "prompt, tokens, rows", [(0, 5, [1]), (5, 0, [1]), (100, 30, [1]), (5, 5, [0]), (5, 5, [])]
)
def test_impossible_lengths_are_refused(recipe, prompt, tokens, rows):
    with refused(RecipeError, "plan-tokens"):
        plan_generation(recipe, ["t4"], prompt=prompt, tokens=tokens, rows=rows)


def test_a_model_without_decode_is_refused():
    with refused(RecipeError, "plan-tokens"):
        plan_generation(cw.load("mnist", synthetic=True), ["t4"], prompt=5, tokens=5)


def test_the_program(capsys, no_gpu_compiler):
    settings = [word for one in SET for word in ("--set", one)]
    asked = ["gpt2-124m", *settings, "--on", "t4,l4", "--prompt", "40", "--tokens", "20", "--texts", "2,4"]
    PLANS["main"]([*asked, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [one["target"] for one in told] == [
        f"{name} at {rows}" for rows in (2, 4) for name in ("t4", "l4")
    ]
    PLANS["main"](asked)
    shown = capsys.readouterr().out
    assert "tokens/s" in shown and "examples/s" not in shown
