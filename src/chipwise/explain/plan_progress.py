"""Progress of a plan on standard error: each answer when it is ready, and the remaining time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Task as BarTask
from rich.text import Text

from ..planner.plans import Plan
from ..words.facts import Fact, fact
from ..words.figures import dollars
from . import terminal


class PlanProgress:
    """Prints answers as they are ready, once something has to be compiled; cached ones appear at once in the
    table. A terminal has a bar below them; elsewhere each line gives the remaining time."""

    def __init__(self, targets: int, bar: Progress):
        self.targets, self.bar = targets, bar
        self.waiting: list[Fact] | None = []  # answers not printed yet; None once they are printed at once
        self.made = 0
        self.left: float | None = None
        self.task = bar.add_task("tracing", total=None, until=None)

    def progress(self, done: int, total: int, name: str, left: float | None) -> None:
        self.left = left
        until = None if left is None else self.bar.get_time() + left
        self.bar.update(self.task, description="compiling", completed=done, total=total, until=until)
        early, self.waiting = self.waiting or [], None
        for one in early:
            self._print(one)

    def ready(self, one: Plan) -> None:
        self.made += 1
        numbers = {"target": one.target, "made": self.made, "targets": self.targets}
        if one.step_seconds is None or one.examples_per_second is None:
            answer = fact("plan-ready-cannot", problem=one.problem, **numbers)
        else:
            cost = one.cheapest()
            price = "" if cost is None else f", {dollars(cost.usd.value)} {cost.cloud}"
            speeds = {"seconds": one.step_seconds.value, "rate": one.examples_per_second.value}
            code = "plan-ready" if one.predicts is None else "plan-ready-predicts"
            answer = fact(code, price=price, **speeds, **numbers)
        if self.waiting is None:
            self._print(answer)
        else:
            self.waiting.append(answer)

    def _print(self, answer: Fact) -> None:
        left = self.left and not self.bar.console.is_terminal
        more = f", {fact('plan-left', seconds=self.left)}" if left else ""
        terminal.lines(self.bar.console, f"{answer}{more}")


class Left(ProgressColumn):
    """The remaining time until the next estimate; nothing once that time is over."""

    def render(self, task: BarTask) -> Text:
        until = task.fields["until"]
        left = 0.0 if until is None else until - task.get_time()
        return Text(str(fact("plan-left", seconds=left)) if left > 0 else "")


@contextlib.contextmanager
def plan_progress(targets: int) -> Iterator[PlanProgress]:
    """The progress of so many targets, whose bar is removed at the end."""
    console = terminal.console(sys.stderr)
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        Left(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield PlanProgress(targets, bar)
