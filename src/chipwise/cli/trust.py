"""`chipwise audit` and `chipwise diff`: whether a run is what it says, and where two part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import RunError
from ..explain.terminal import console, lines
from ..words.facts import Fact, fact
from . import options
from .options import argument, option

if TYPE_CHECKING:
    from ..proof.diff import Side


def _say(said: Fact) -> None:
    typer.echo(str(said), err=True)


def _silent(_: Fact) -> None:
    """For `--json`."""


@options.taking
def audit(
    here: options.Here,
    run: Path = options.RUN,
    steps: str | None = option("What to compute again: 4000:4100, or 0: for all.", "A:B"),
    every: str | None = option("One interval as often as this.", "DURATION"),
    data: str | None = options.DATA,
    recipe: str | None = options.OF_RUN,
    json_: bool = options.JSON,
) -> None:
    """Compute parts of a run again, and compare them with its ledger, bit by bit. Writes RUN/audit.json.

    \b
    Examples:
      chipwise audit runs/mnist-1
      chipwise audit runs/mnist-1 --steps 4000:4100 --devices 1
      chipwise audit runs/mine --recipe my_task.py:recipe --every 10%

    By default, one interval after each checkpoint (train --keep) and at the beginning. On any number of
    devices of the run's kind; another kind has other bits, so only metrics are compared there, within 2 %.
    """
    on = here.on()
    from ..atomic import put_inside
    from ..deploy.model import recipe_of
    from ..engine.stored import read_run
    from ..proof.audit import FILE
    from ..proof.audit import audit as check

    loaded = recipe_of(read_run(run), recipe, data)
    verdict, statement = check(run, loaded, steps=steps, every=every, on=on, say=_silent if json_ else _say)
    try:
        put_inside(run / FILE, (json.dumps(statement, indent=2) + "\n").encode())
    except OSError as error:
        text = "Cannot write {path}: {reason}. Copy the run to a folder of yours."
        raise RunError("audit-unwritable", text, path=str(run / FILE), reason=error) from error
    if json_:
        print(json.dumps(statement))
    if not statement["passed"]:
        raise RunError(verdict.code, verdict.sentence, **verdict.numbers)
    if not json_:
        lines(console(), verdict, fact("written", path=run / FILE))


@options.taking
def diff(
    here: options.Here,
    a: str = argument("A run folder or a recipe."),
    b: str | None = argument("Another one. [A with --set or --data-b]", default=None),
    set_: list[str] | None = option("Change a setting of B; may be repeated.", "KEY=VALUE"),
    data: str | None = options.DATA,
    data_b: str | None = option("The data of B. [that of A]", "DIR"),
    steps: int | None = option("Follow them so far. [to where ledgers part, else 1000]", "N", min=1),
    json_: bool = options.JSON,
) -> None:
    """Find the first step at which two runs or recipes part, and the first cause: input, line, size.

    \b
    Examples:
      chipwise diff base.py:recipe changed.py:recipe
      chipwise diff digits --set lr=0.1
      chipwise diff runs/a runs/b

    Of a run of a recipe file, name the file: runs/a=my_task.py:recipe.
    """
    on = here.on()
    from ..proof.diff import diff as find

    second = a if b is None else b
    sides = _side(a, (), data), _side(second, set_ or (), data_b or data)
    found = find(*sides, steps=steps, on=on, say=_silent if json_ else _say)
    if json_:
        print(json.dumps(found.to_json(), default=str))
        return
    to = console()
    lines(to, found.verdict)
    if found.settings:
        lines(to, fact("diff-settings", "settings: {changed:changes}", changed=found.settings))
    lines(to, *(f"- {cause}" for cause in found.causes))


def _side(name: str, settings: tuple[str, ...] | list[str], data: str | None) -> Side:
    """What an argument names: a folder with a run, with `=FILE:NAME` its recipe, or a recipe."""
    from ..deploy.model import recipe_of
    from ..engine.stored import read_run
    from ..proof.diff import Side
    from ..recipe.settings import load

    folder, _, recipe = name.partition("=")
    if not Path(folder).is_dir():
        return Side(" ".join([name, *settings]), load(name, settings, data))
    stored = read_run(folder)
    if settings:
        text = "--set changes B, and {run} is a run, whose settings are fixed: name its recipe instead."
        raise RunError("diff-set-of-run", text, run=folder)
    return Side(folder, recipe_of(stored, recipe or None, data), stored)
