"""Gives answers: prints tables and lines for people, without markup or broken lines, or JSON. Also
writes an answer's page.

An answer has *parts*: a `Title`, lines, tables (`grid`, `table`), and pictures, which only HTML
shows: a `charts.Panel`, or `Tiles`.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..base import fact
from ..base.figures import printable
from ..base.files import replace_file
from .charts import Panel


@dataclass(frozen=True)
class Title:
    """The title of an answer (level 1), or of a part of it."""

    words: str
    level: int = 2

    def __rich__(self) -> Text:
        return (
            Text(printable(self.words), "bold")
            if self.level == 1
            else Text(f"\n{printable(self.words)}", "bold underline")
        )


@dataclass(frozen=True)
class Tiles:
    """Small pictures, with `name` and `image`, a data URL or `None`."""

    tiles: Sequence[Mapping[str, Any]]


Part = RenderableType | Panel | Tiles
Document = Mapping[str, Any]
"""An answer as JSON values."""


def console(to: IO[str] | None = None, width: int | None = 120, quiet: bool = False) -> Console:
    """A console on `to`, by default standard output. It is as wide as the terminal, or `width`
    columns if `to` is no terminal. If `quiet`, it prints nothing."""
    to = sys.stdout if to is None else to
    width = None if to.isatty() else width
    return Console(file=to, highlight=False, width=width, quiet=quiet, force_jupyter=False)


def lines(to: Console, *texts: Any) -> None:
    """Prints texts or facts, a line each, as they are. Nothing in them is markup."""
    printed(to, map(str, texts))


def printed(to: Console, parts: Iterable[Part]) -> None:
    """Prints tables and lines. The terminal wraps long lines, so that a command can be copied
    whole."""
    for part in parts:
        if isinstance(part, Panel | Tiles):
            continue
        if isinstance(part, str):
            part = Text(part)
        if isinstance(part, Text):  # nothing in it moves the cursor
            part = Text("\n".join(map(printable, part.plain.split("\n"))), part.style)
        to.print(part, markup=False, soft_wrap=not isinstance(part, Table))


def answer(
    document: Document,
    parts: Iterable[Part],
    html: Path | None,
    json_: bool,
    page: Iterable[Part] | None = None,
) -> None:
    """Writes the page of a document if `html` is given. Prints the document with `json_`, otherwise
    `parts` for people. *Arguments:* `page`: the page's parts, by default all `parts`."""
    parts = list(parts)
    if html is not None:
        from .page import render

        shown = parts if page is None else list(page)
        replace_file(html, render(shown, document), "page-unwritable")
    if json_:
        print(json.dumps(document))
        return
    to = console()
    printed(to, parts)
    if html is not None:
        lines(to, "", fact("written", path=html))


def heading(schema: str) -> dict[str, Any]:
    """The first fields of a document: its schema, chipwise's version and the current time."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"schema": schema, "chipwise": __version__, "created": now}


def texts(facts: Iterable[Mapping[str, Any]]) -> list[str]:
    """The sentences of a document's facts."""
    return [one["text"] for one in facts]


def text(value: Any) -> Text:
    """A cell's text. Nothing in it is markup, and nothing moves the cursor."""
    return value if isinstance(value, Text) else Text(printable(str(value)))


def grid(rows: Iterable[tuple[str, Any]], style: str = "") -> Table:
    """A table of two columns, names and values, without a header."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style=style, overflow="fold")
    for name, value in rows:
        table.add_row(text(name), text(value))
    return table


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]] = (),
    *,
    left: Sequence[str] = (),
    fold: Sequence[str] = (),
    **style: Any,
) -> Table:
    """A table. The columns `left` are aligned to the left, the others to the right. Cells of `fold`
    may break."""
    rich = Table(box=None, pad_edge=False, **style)
    for name in columns:
        justify: Any = "left" if name in left else "right"
        rich.add_column(text(name), justify=justify, no_wrap=name not in fold, overflow="fold")
    for row in rows:
        rich.add_row(*map(text, row))
    return rich
