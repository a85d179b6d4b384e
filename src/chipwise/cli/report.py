"""`chipwise report RUN`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import options


def report(
    run: Annotated[Path, typer.Argument(help="A run folder, or the folder of a study.")],
    recipe: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="The run's recipe, path.py:name; its file is run. [if built in]"),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one self-contained page.")] = None,
    json_: options.Json = False,
) -> None:
    """Tell a run's story: settings, curves, where the time went, what was slow, what to try.

    \b
    Examples:
      chipwise report runs/mnist-1
      chipwise report runs/mnist-1 --html report.html
      chipwise report runs/mine --recipe my_task.py:recipe --json
    """
    import jax

    jax.config.update("jax_platforms", "cpu")  # nothing here needs, or should hold, an accelerator
    from ..explain.report import page, text
    from ..explain.report.story import report as tell

    document = tell(run, recipe)
    if html is not None:
        page.write(document, html)
    if json_:
        print(json.dumps(document, allow_nan=False))
        return
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    for part in text.parts(document):
        console.print(part, markup=False, soft_wrap=isinstance(part, str))
    if html is not None:
        console.print(f"\nwritten: {html}", markup=False, soft_wrap=True)
