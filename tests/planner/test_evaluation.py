"""The evaluation of a plan: a block of it is compiled, timed, and counted in memory."""

import dataclasses

import pytest

import chipwise as cw
import tasks
from chipwise.base.prediction import Range
from chipwise.chips.targets import parse
from chipwise.compile.answers import Answer
from chipwise.data.sources import nbytes as source_bytes
from chipwise.planner import time_step
from chipwise.planner.time_run import training_work
from chipwise.planner.tracing import EVALUATION, training_step
from chipwise.recipe.task import by_path
from chipwise.run.session import Session
from chipwise.step.layout import Layout
from chipwise.step.state import abstract_model, nbytes
from compilers import no_gpu_compiler as no_gpu_compiler

RECIPE = tasks.recipe()
LAYOUT = Layout.of(RECIPE, 2)


def step(keeps):
    return training_step(RECIPE, LAYOUT, resident=True, keeps_evaluation=keeps)


@pytest.mark.slow
def test_it_is_the_block_of_the_engine():
    with Session(RECIPE, cw.On(devices=2)) as session:
        session.begin()
        session.evaluate()
        (blocks, *_), evaluator = session._evaluator._programs, session._evaluator
        made, plain = step(True), step(None)
        program = made.programs[-1]
        assert (program.name, made.eval_block) == (EVALUATION, evaluator.blocks.size)
        columns = {n: (a.shape, a.dtype) for n, a in blocks.in_avals[0][2].items()}
        assert columns == {n: (a.shape, a.dtype) for n, a in program.specs[2].items()}
    assert EVALUATION not in [one.name for one in plain.programs]
    assert made.data_bytes - plain.data_bytes == source_bytes(RECIPE.task.eval)
    ahead, block = step(False).data_bytes - plain.data_bytes, made.eval_block * (tasks.FEATURES + 4)
    assert ahead > block and ahead % block == 0


def test_memory_is_that_of_the_program_that_needs_most():
    made = step(True)
    small, large = (made.memory({"replica": 10_000, EVALUATION: n}, 0, 1 << 30, None) for n in (0, 1 << 20))
    assert small.activations == 10_000 and large.activations == 1 << 20


def test_matrices_with_adapters_are_counted_twice_in_an_evaluation():
    kernels = [path for path, x in by_path(abstract_model(RECIPE)[0]).items() if x.ndim > 1]
    recipe = dataclasses.replace(RECIPE, adapters=cw.recipe.lora(rank=1, alpha=2, on=kernels[0]))
    made = training_step(recipe, LAYOUT, resident=True, keeps_evaluation=True)
    matrix = by_path(abstract_model(recipe)[0])[kernels[0]]
    assert made.eval_merged_bytes == nbytes(matrix) and step(True).eval_merged_bytes == 0
    names = ("replica", "update", EVALUATION)
    answers = {name: Answer(name, temp_bytes=1 << (21 if name == EVALUATION else 20)) for name in names}
    whole = time_step.memory_needed(made, parse("a100"), answers)
    merged = time_step.memory_needed(dataclasses.replace(made, eval_merged_bytes=0), parse("a100"), answers)
    assert whole.activations - merged.activations == made.eval_merged_bytes


@pytest.mark.slow
def test_its_time_is_that_of_its_blocks_on_all_devices(monkeypatch, no_gpu_compiler):
    monkeypatch.setattr(time_step, "one_call", lambda *about: Range(2.0, 2.0, 2.0))
    (plan,) = cw.plan(dataclasses.replace(RECIPE, eval_block=10), ["a100:2"], eval_every="50%")
    blocks = -(-len(RECIPE.task.eval) // 10)
    assert plan.evaluations == 2
    turns = 2 * -(-blocks // plan.devices)
    assert plan.devices == 2 and plan.seconds["evaluate"] == 2.0 * turns


def test_a_third_of_a_step_where_it_is_not_compiled():
    work = training_work(RECIPE, Range.around(3.0, 2.0), 4, None)
    assert work["evaluate"].value == 4 * len(RECIPE.task.eval) / RECIPE.batch
