"""The time of a run: as many evaluations as the run will make."""

import dataclasses

import pytest

import chipwise as cw
from chipwise.base.errors import RecipeError
from chipwise.planner.time_run import evaluations
from chipwise.run.run_schedule import Agenda
from refusals import refused


@pytest.mark.parametrize("every", ["1ep", "2ep", "3ep", "0.3ep", "7st", "1st", "10%", "200%", "end", None])
@pytest.mark.parametrize("duration", ["1st", "3ep", "41st", "42st", "43st"])
def test_evaluations_are_those_of_the_run(every, duration):
    recipe = dataclasses.replace(cw.load("digits"), duration=duration)
    agenda = Agenda.of(recipe.clock, every, None, None, None)
    assert evaluations(recipe, every) == len(list(agenda.evaluate))


def test_the_end_is_a_time_of_rows_evaluations_and_checkpoints_alike():
    clock = cw.load("digits").clock
    agenda = Agenda.of(clock, "end", "end", "end", None)
    assert list(agenda.log) == list(agenda.evaluate) == [clock.total]
    assert not list(agenda.save)  # after its last step a run saves in any case


def test_without_data_to_evaluate_there_are_none():
    recipe = cw.load("digits")
    task = dataclasses.replace(recipe.task, eval=None)
    assert evaluations(dataclasses.replace(recipe, task=task), "1ep") == 0


def test_what_is_no_duration_is_refused_before_anything_is_compiled():
    with refused(RecipeError, "duration-unreadable"):
        cw.plan(cw.load("digits"), ["v5e-8"], eval_every="often")
