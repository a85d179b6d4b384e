"""`chipwise transfer RECIPE --batch N`."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import options

if TYPE_CHECKING:
    from ..recipe.recipe import Recipe


def transfer(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe (digits, mnist, ...) or path.py:name.")],
    batch: Annotated[int | None, typer.Option(metavar="N", help="The new global batch.")] = None,
    replicas: Annotated[int | None, typer.Option(metavar="N", help="The new number of replicas.")] = None,
    duration: Annotated[
        str | None, typer.Option(metavar="DURATION", help="The new length, such as 48ep.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="A peak rate instead of the rule's; the decay makes up for it.")
    ] = None,
    data: options.Data = None,
    set_: options.Set = None,
    apply: Annotated[
        Path | None, typer.Option(metavar="FILE.py", help="Write the new recipe; FILE.py:recipe is then it.")
    ] = None,
    json_: options.Json = False,
) -> None:
    """Move a recipe to another batch, number of replicas or length, and say why each number changes.

    \b
    Examples:
      chipwise transfer cifar10-davidnet --batch 128
      chipwise transfer mnist --batch 1024 --replicas 32 --apply mnist_1024.py
      chipwise transfer my_task.py:recipe --batch 64 --set lr=0.2 --json
    """
    import jax

    jax.config.update("jax_platforms", "cpu")  # nothing here needs, or should hold, an accelerator
    from ..recipe.recipe_file import write_recipe
    from ..recipe.settings import load
    from ..study.move.transfer import UNAFFECTED
    from ..study.move.transfer import transfer as move

    settings = set_ or []
    old = load(recipe, settings, data)
    moved = move(old, batch=batch, replicas=replicas, duration=duration, lr=lr)
    if apply is not None:
        title = f"{old.name}, moved from batch {old.batch} to {moved.recipe.batch} by `chipwise transfer`."
        write_recipe(apply, old=old, new=moved.recipe, spec=recipe, settings=settings, title=title)
    if json_:
        print(json.dumps(moved.to_json()))
        return
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table(box=None, pad_edge=False)
    for name in ("setting", "old", "new"):
        table.add_column(name, no_wrap=True)
    table.add_column("why", overflow="fold")
    table.add_column("source", overflow="fold")
    for change in moved.changes:
        cells = [change.setting, *change.shown, change.why, change.source]
        table.add_row(*cells, style="bold" if change.changed else "dim")
    console.print(table)
    console.print(f"\n{UNAFFECTED}", markup=False, soft_wrap=True)
    if moved.limits:
        console.print("\nWhere this may fail:", soft_wrap=True)
        for text in moved.limits:
            console.print(f"- {text}", markup=False, soft_wrap=True)
    if apply is not None:
        console.print(f"\nwritten: {apply}", markup=False, soft_wrap=True)
        console.print(f"Next: {train_line(apply, data)}", markup=False, soft_wrap=True)
        return
    given = {"--batch": batch, "--replicas": replicas, "--duration": duration, "--lr": lr}
    lines = apply_lines(recipe, moved.recipe, given, settings, data)
    console.print(f"\nNext: {lines}", markup=False, soft_wrap=True)


def apply_lines(
    spec: str, new: Recipe, given: Mapping[str, object], settings: Sequence[str], data: str | None
) -> str:
    """What to type to write the transferred recipe `new` to a file, and to train that: two lines.

    *Arguments:* `given`: options of `chipwise transfer` and their values, or None for those left out.
    """
    to = Path(re.sub(r"\W+", "_", f"{new.name}_{new.batch}") + ".py")
    words = ["chipwise", "transfer", spec]
    for option, value in given.items():
        words += [] if value is None else [option, f"{value:g}" if isinstance(value, float) else str(value)]
    words += [word for text in settings for word in ("--set", text)]
    words += [] if data is None else ["--data", data]
    return f"{shlex.join([*words, '--apply', str(to)])}\n      {train_line(to, data)}"


def train_line(recipe_file: Path, data: str | None, synthetic: bool = False) -> str:
    """What to type to train the recipe of a file that was written."""
    words = ["chipwise", "train", f"{recipe_file}:recipe", *([] if data is None else ["--data", data])]
    return shlex.join([*words, *(["--synthetic"] if synthetic else [])])
