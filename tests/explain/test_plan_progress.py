"""What is seen while a plan is made."""

import dataclasses

from rich.progress import Progress

from chipwise.base.facts import fact
from chipwise.explain.plan_progress import PlanProgress, plan_progress
from planner import documents


def test_answers_are_told_as_they_come(capsys):
    v5e, *_, failed = [dataclasses.replace(p, costs=()) for p in documents.plans()]
    with plan_progress(2) as shown:
        shown.ready(v5e)
        assert capsys.readouterr().err == ""  # known: the table has it at once
        shown.progress(0, 3)
        shown.ready(failed)
    speeds = {"seconds": v5e.step_seconds.value, "rate": v5e.examples_per_second.value}
    first = fact("plan-ready", target="v5e-8", price="", made=1, targets=2, **speeds)
    last = fact("plan-ready-cannot", target=failed.target, problem=failed.problem, made=2, targets=2)
    assert capsys.readouterr().err.splitlines() == [str(first), str(last)]


def test_a_terminal_shows_something_before_anything_is_compiled():
    with Progress(disable=True) as bar:
        shown = PlanProgress(1, bar)
        (task,) = bar.tasks
        assert task.visible and task.description == "tracing"
        shown.progress(1, 3)
        assert task.description == "compiling" and (task.completed, task.total) == (1, 3)
