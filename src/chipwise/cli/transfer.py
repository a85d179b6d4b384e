"""`chipwise transfer RECIPE --batch N`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import options


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
    from ..recipe_file import write_recipe
    from ..settings import load
    from ..transfer.transfer import UNAFFECTED
    from ..transfer.transfer import transfer as move

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
