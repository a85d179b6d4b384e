"""What is seen while a plan is made."""

import dataclasses

import pytest
from rich.progress import Progress

from chipwise.explain.plan_progress import Left, PlanProgress, plan_progress
from chipwise.words.facts import fact
from planner import documents


def told(capsys, compiled=True):
    v5e, *_, failed = [dataclasses.replace(p, costs=()) for p in documents.plans()]
    with plan_progress(2) as shown:
        shown.ready(v5e)
        if compiled:
            shown.progress(0, 3, "", None)
            shown.progress(1, 3, "replica", 40.0)
        shown.ready(failed)
    return capsys.readouterr().err.splitlines()


def test_answers_are_told_as_they_come_with_what_is_left(capsys):
    v5e, *_, failed = documents.plans()
    speeds = {"seconds": v5e.step_seconds.value, "rate": v5e.examples_per_second.value}
    first = fact("plan-ready", target="v5e-8", price="", made=1, targets=2, **speeds)
    last = fact("plan-ready-cannot", target=failed.target, problem=failed.problem, made=2, targets=2)
    assert told(capsys) == [str(first), f"{last}, {fact('plan-left', seconds=40.0)}"]


def test_what_was_known_is_told_once_in_the_table(capsys):
    assert told(capsys, compiled=False) == []


def test_a_terminal_shows_something_before_anything_is_compiled():
    with Progress(disable=True) as bar:
        shown = PlanProgress(1, bar)
        (task,) = bar.tasks
        assert task.visible and task.description == "tracing"
        shown.progress(0, 3, "", None)
        assert task.description == "compiling" and task.total == 3


@pytest.mark.parametrize("seconds, left", [(0, 40.0), (10, 30.0), (40, None), (50, None)])
def test_on_a_terminal_the_remaining_time_runs_out(seconds, left):
    now = [100.0]
    with Progress(Left(), get_time=lambda: now[0], disable=True) as bar:
        shown = PlanProgress(1, bar)
        shown.progress(0, 3, "", None)
        (task,) = bar.tasks
        assert Left().render(task).plain == ""
        shown.progress(1, 3, "replica", 40.0)
        now[0] += seconds
        assert Left().render(task).plain == ("" if left is None else str(fact("plan-left", seconds=left)))
