"""Progress of a plan on standard error: a line for each answer when it is ready, and a bar on a
terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..base import Fact, fact
from ..base.figures import dollars
from ..planner.plans import Plan
from . import terminal


class PlanProgress:
    """Prints the answers for a number of targets above a bar, once something has to be compiled.
    Otherwise prints nothing, because the table shows the answers at once."""

    def __init__(self, targets: int, bar: Progress):
        self.targets = targets
        self.bar = bar
        self.made = 0
        self.waiting: list[Fact] = []
        self.task = bar.add_task("tracing", total=None)

    def progress(self, done: int, total: int) -> None:
        self.bar.update(self.task, description="compiling", completed=done, total=total)
        self._print()

    def ready(self, one: Plan) -> None:
        self.made += 1
        self.waiting.append(_answer(one, made=self.made, targets=self.targets))
        if self.bar.tasks[0].total is not None:
            self._print()

    def _print(self) -> None:
        terminal.lines(self.bar.console, *self.waiting)
        self.waiting.clear()


def _answer(one: Plan, **count: int) -> Fact:
    if one.step_seconds is None or one.examples_per_second is None:
        return fact("plan-ready-cannot", target=one.target, problem=one.problem, **count)
    cost = one.cheapest()
    price = "" if cost is None else f", {dollars(cost.usd.value)} {cost.cloud}"
    return fact(
        "plan-ready",
        target=one.target,
        price=price,
        seconds=one.step_seconds.value,
        rate=one.examples_per_second.value,
        **count,
    )


@contextlib.contextmanager
def plan_progress(targets: int) -> Iterator[PlanProgress]:
    """Shows the progress of a plan for a number of targets. Removes the bar at the end."""
    console = terminal.console(sys.stderr)
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield PlanProgress(targets, bar)
