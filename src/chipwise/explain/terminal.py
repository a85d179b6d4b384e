"""How answers are given: tables and lines for people, without markup or broken lines; JSON; a page."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..atomic import replace_file
from ..words.facts import fact
from ..words.figures import printable


def console(to: IO[str] | None = None, width: int | None = 120, quiet: bool = False) -> Console:
    """A console on `to`, standard output by default: as wide as the terminal, or `width` where it is none.
    If `quiet`, it prints nothing."""
    to = sys.stdout if to is None else to
    return Console(file=to, highlight=False, width=None if to.isatty() else width, quiet=quiet)


def lines(to: Console, *texts: Any) -> None:
    """Prints texts or facts, a line each, as they are: nothing in them is markup, and the terminal breaks
    them, so that a command can be copied whole."""
    for text in texts:
        to.print("\n".join(map(printable, str(text).split("\n"))), markup=False, soft_wrap=True)


def printed(to: Console, parts: Iterable[RenderableType]) -> None:
    """Prints tables, and lines that the terminal breaks, so that a command can be copied whole."""
    for part in parts:
        shown = "\n".join(map(printable, part.split("\n"))) if isinstance(part, str) else part
        to.print(shown, markup=False, soft_wrap=not isinstance(part, Table))


def answer(
    document: Mapping[str, Any], parts: Iterable[RenderableType], page: Callable[[], str], html: Path | None,
    json_: bool,
) -> None:  # fmt: skip
    """Writes the page of a document where one is asked for; prints `parts` for people, or the document."""
    if html is not None:
        replace_file(html, page(), "page-unwritable")
    if json_:
        print(json.dumps(document))
        return
    to = console()
    printed(to, parts)
    if html is not None:
        lines(to, "", fact("written", path=html))


def heading(schema: str) -> dict[str, Any]:
    """How a document begins: its schema, and what made it when."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"schema": schema, "chipwise": __version__, "created": now}


def texts(facts: Iterable[Mapping[str, Any]]) -> list[str]:
    """The sentences of a document's facts."""
    return [one["text"] for one in facts]


def text(value: Any) -> Text:
    """What a cell holds: nothing in it is markup, and nothing moves the cursor."""
    return value if isinstance(value, Text) else Text(printable(str(value)))


def grid(rows: Iterable[tuple[str, Any]], style: str = "") -> Table:
    """Names and what they are, in two columns."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style=style, overflow="fold")
    for name, value in rows:
        table.add_row(text(name), text(value))
    return table


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]] = (), *, left: Sequence[str] = (),
    fold: Sequence[str] = (), **style: Any,
) -> Table:  # fmt: skip
    """A table: numbers stand right, the columns `left` left, and those of `fold` may break."""
    rich = Table(box=None, pad_edge=False, **style)
    for name in columns:
        justify: Any = "left" if name in left else "right"
        rich.add_column(text(name), justify=justify, no_wrap=name not in fold, overflow="fold")
    for row in rows:
        rich.add_row(*map(text, row))
    return rich
