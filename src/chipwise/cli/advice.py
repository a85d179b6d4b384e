"""`chipwise check` and `chipwise transfer`: advice on a recipe without running it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..explain.terminal import console, lines, table
from ..words.facts import fact
from . import options
from .options import option

if TYPE_CHECKING:
    from ..recipe.recipe import Recipe


@options.taking
def check(
    recipe: options.Given,
    on: Annotated[
        str | None, option("Also warn about this device, such as v3-8 or a100:8.", "TARGET")
    ] = None,
    json_: options.Json = False,
) -> None:
    """Warn about settings that are probably mistakes, one line each. Exit code 0 even with warnings.

    \b
    Examples:
      chipwise check cifar10-davidnet --set weight_decay=1.25e-4
      chipwise check mnist --set batch=100 --on v3-8
      chipwise check my_task.py:recipe --json
    """
    options.only_look()
    from ..recipe.check import check as look

    loaded = recipe.load()
    findings = look(loaded, on)
    if json_:
        texts = [finding.json() for finding in findings]
        print(json.dumps({"schema": "chipwise.check/1", "recipe": loaded.name, "on": on, "findings": texts}))
        return
    for finding in findings:
        print(f"warning: {finding}")
    if not findings:
        print(fact("no-findings", recipe=loaded.name))


@options.taking
def transfer(
    recipe: options.Given,
    batch: Annotated[int | None, option("The new global batch.", "N")] = None,
    replicas: Annotated[int | None, option("The new number of replicas.", "N")] = None,
    duration: Annotated[str | None, option("The new length, such as 48ep.", "DURATION")] = None,
    lr: Annotated[
        float | None, option("Peak rate to use instead of the rule's; the decay compensates.")
    ] = None,
    apply: Annotated[
        Path | None, option("Write the new recipe to FILE.py; train it as FILE.py:recipe.", "FILE.py")
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
    options.only_look()
    from ..study.transfer import UNAFFECTED
    from ..study.transfer import transfer as move

    old = recipe.load()
    moved = move(old, batch=batch, replicas=replicas, duration=duration, lr=lr)
    if apply is not None:
        title = f"{old.name}, moved from batch {old.batch} to {moved.recipe.batch} by `chipwise transfer`."
        recipe.write(apply, old, moved.recipe, title)
    if json_:
        print(json.dumps(moved.to_json()))
        return
    to = console()
    changes = table(
        ("setting", "old", "new", "why", "source"),
        left=("setting", "old", "new", "why", "source"),
        fold=("why", "source"),
    )
    for change in moved.changes:
        cells = [change.setting, *change.shown, change.why, change.source]
        changes.add_row(*map(str, cells), style="bold" if change.changed else "dim")
    to.print(changes)
    lines(to, "", UNAFFECTED)
    if moved.limits:
        lines(to, "", fact("may-fail"), *(f"- {limit}" for limit in moved.limits))
    if apply is not None:
        lines(to, "", fact("written", path=apply), fact("next", command=recipe.train_line(file=apply)))
        return
    changed = {"--batch": batch, "--replicas": replicas, "--duration": duration, "--lr": lr}
    lines(to, "", fact("next", command=apply_lines(recipe, moved.recipe, changed)))


def apply_lines(given: options.Given, new: Recipe, changed: Mapping[str, object]) -> str:
    """The commands, on two lines, that write the transferred recipe `new` to a file and train it.

    *Arguments:* `changed`: options of `chipwise transfer` and their values, None if not given.
    """
    file = Path(re.sub(r"\W+", "_", f"{new.name}_{new.batch}") + ".py")
    words = ["chipwise", "transfer", given.recipe]
    for name, value in changed.items():
        words += [] if value is None else [name, f"{value:g}" if isinstance(value, float) else str(value)]
    words += [*given.words(), "--apply", str(file)]
    return f"{shlex.join(words)}\n      {given.train_line(file=file)}"
