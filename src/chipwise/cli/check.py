"""`chipwise check RECIPE`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from . import options


def check(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe (digits, mnist, ...) or path.py:name.")],
    on: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help="Also doubts about that device, such as v3-8 or a100:8."),
    ] = None,
    data: options.Data = None,
    set_: options.Set = None,
    json_: options.Json = False,
) -> None:
    """Warn about settings that are probably not meant, one line each. Exit code 0 also with warnings.

    \b
    Examples:
      chipwise check cifar10-davidnet --set weight_decay=1.25e-4
      chipwise check mnist --set batch=100 --on v3-8
      chipwise check my_task.py:recipe --json
    """
    import jax

    jax.config.update("jax_platforms", "cpu")  # nothing here needs, or should hold, an accelerator
    from ..recipe.check import check as look
    from ..recipe.settings import load

    loaded = load(recipe, set_ or (), data)
    found = look(loaded, on)
    if json_:
        findings = [dataclasses.asdict(finding) for finding in found]
        print(
            json.dumps({"schema": "chipwise.check/1", "recipe": loaded.name, "on": on, "findings": findings})
        )
        return
    for finding in found:
        print(f"warning: {finding}")
    if not found:
        print(f"{loaded.name}: nothing to warn about.")
