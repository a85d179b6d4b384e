"""Progress of a plan on standard error: a bar on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import terminal


@contextlib.contextmanager
def plan_progress() -> Iterator[Callable[[int, int], None]]:
    """A context with a bar, which is removed at its end. *Yields* a function of the programs that are
    compiled, and of all."""
    console = terminal.console(sys.stderr)
    columns = TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tracing", total=None)
        yield lambda done, total: bar.update(task, description="compiling", completed=done, total=total)
