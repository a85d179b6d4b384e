"""How commands print: tables and lines for people on standard output, without markup or broken lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def console(to: IO[str] | None = None, width: int | None = 120) -> Console:
    """A console on `to`, standard output by default: as wide as the terminal, or `width` where it is none."""
    to = sys.stdout if to is None else to
    return Console(file=to, highlight=False, width=None if to.isatty() else width)


def lines(on: Console, *texts: Any) -> None:
    """Prints texts or facts, a line each, as they are: nothing in them is markup, and the terminal breaks
    them, so that a command can be copied whole."""
    for text in texts:
        on.print(str(text), markup=False, soft_wrap=True)


def grid(rows: Iterable[tuple[str, Any]]) -> Table:
    """Names and what they are, in two columns."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(str(value)))  # Text, because a message with [brackets] is not markup
    return table


def table(columns: Sequence[str], left: Sequence[str] = (), fold: Sequence[str] = (), **style: Any) -> Table:
    """An empty table: numbers stand right, the columns `left` left, and those of `fold` may break."""
    empty = Table(box=None, pad_edge=False, **style)
    for name in columns:
        words = name in left
        empty.add_column(
            name, justify="left" if words else "right", no_wrap=name not in fold, overflow="fold"
        )
    return empty
