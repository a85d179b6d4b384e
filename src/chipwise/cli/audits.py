"""`chipwise audit`: checks a run against its ledger, and finds where two runs or recipes part."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import RecipeError, RunError, fact
from ..explain.terminal import console, lines
from . import options
from .options import argument, option
from .standard_output import print_json

if TYPE_CHECKING:
    from ..proof.diff import Side
    from ..run.on import On


@options.taking
def audit(
    here: options.Here,
    a: str = argument("A run folder; with B or --set, or a recipe."),
    b: str | None = argument("Run or recipe to compare A with. [its own ledger]", default=None),
    steps: str | None = option(
        "Steps to audit: 4000:4100, or 0: for all. Of two runs: the last one.", "A:B|N"
    ),
    every: str | None = option(
        "Audit one interval in each stretch of this length, such as 10%.", "DURATION"
    ),
    set_: list[str] | None = option(
        "Change a setting of B, by default A; may be repeated.", "KEY=VALUE"
    ),
    data: str | None = options.DATA,
    data_b: str | None = option("The data of B. [that of A]", "DIR"),
    recipe: str | None = options.OF_RUN,
    json_: bool = options.JSON,
) -> None:
    """Compute parts of a run again and compare them with its ledger, or find where two part.

    \b
    Examples:
      chipwise audit runs/mnist-1
      chipwise audit runs/mnist-1 --steps 4000:4100 --devices 1
      chipwise audit runs/mine --recipe my_task.py:recipe --every 10%
      chipwise audit runs/a runs/b
      chipwise audit digits --set lr=0.1
      chipwise audit base.py:recipe changed.py:recipe

    For one run, the default is one interval at the beginning and one after each checkpoint (train
    --keep). The result is in RUN/audit.json. Any number of devices of the run's kind will do.
    Another kind has other bits, so only metrics are compared there, within 2 %. For two, the answer
    is the first step at which they part, and the first cause: input, line, size. For a run of a
    recipe file, name the file: runs/a=my_task.py:recipe.
    """
    if b is None and not set_ and data_b is None:
        _audit(here.on(), Path(a), steps, every, data, recipe, json_)
        return
    if every is not None or not (steps or "1").isdecimal() or steps == "0":
        text = "Two are followed to one step: give --steps 1000, and leave out --every."
        raise RecipeError("audit-of-two", text, steps=steps, every=every)
    sides = _side(a, (), data, recipe), _side(b or a, set_ or (), data_b or data, recipe)
    _diff(here.on(), sides, int(steps) if steps else None, json_)


def _audit(
    on: On,
    run: Path,
    steps: str | None,
    every: str | None,
    data: str | None,
    recipe: str | None,
    json_: bool,
) -> None:
    """Audits a run, and writes its `audit.json`."""
    from ..base.files import put_inside
    from ..base.locks import FolderHandle
    from ..deploy.model import recipe_of
    from ..proof.audit import FILE, audit as check
    from ..run.folder.run_reader import read_run

    loaded = recipe_of(read_run(run), recipe, data)
    said: Any = {} if json_ else {"say": options.say}
    with contextlib.closing(FolderHandle(run)) as audited:
        verdict, statement = check(run, loaded, steps=steps, every=every, on=on, **said)
        text = "Cannot write {path}: {reason}. Copy the run to a folder of yours."
        with RunError.of_system("audit-unwritable", text, path=str(run / FILE)):
            # In the folder that was audited, wherever it is by now
            put_inside(audited.path / FILE, (json.dumps(statement, indent=2) + "\n").encode())
    if json_:
        print_json("audit/1", statement)
    if not statement["passed"]:
        raise RunError.of(verdict)
    if not json_:
        lines(console(), verdict, fact("audit-unaudited", what=statement["unaudited"]))
        lines(console(), fact("written", path=run / FILE))


def _diff(on: On, sides: tuple[Side, Side], steps: int | None, json_: bool) -> None:
    """Follows two to the step at which they part."""
    from ..proof.diff import diff

    said: Any = {} if json_ else {"say": options.say}
    found = diff(*sides, steps=steps, on=on, **said)
    if json_:
        print_json("diff/1", found.to_json())
        return
    to = console()
    lines(to, found.verdict)
    if found.settings:
        lines(to, fact("diff-settings", "settings: {changed:changes}", changed=found.settings))
    lines(to, *(f"- {cause}" for cause in found.causes))


def _side(
    name: str, settings: tuple[str, ...] | list[str], data: str | None, named: str | None
) -> Side:
    """The run or recipe that an argument names: a folder with a run, with `=FILE:NAME` for its
    recipe, or a recipe. `named`: the recipe of runs without `=FILE:NAME`."""
    from ..deploy.model import recipe_of
    from ..proof.diff import Side
    from ..recipes.load import load
    from ..run.folder.run_reader import read_run

    folder, _, recipe = name.partition("=")
    if not Path(folder).is_dir():
        return Side(" ".join([name, *settings]), load(name, settings, data))
    stored = read_run(folder)
    if settings:
        raise RunError("diff-set-of-run", run=folder)
    return Side(folder, recipe_of(stored, recipe or named, data), stored)
