"""`chipwise compare A B ...`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .chips import PriceFile
from .terminal import console, lines


def compare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="A B ...",
            help="Records, run folders, studies, plans (--json), folders of records, published[:WORDS]; "
            "LABEL=PATH names a row.",
        ),
    ],
    baseline: Annotated[
        str | None, typer.Option(metavar="A", help="The row that the others are held against. [the first]")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="VALUE", help="Also the time to 0.94 (eval/accuracy), or to METRIC=VALUE."),
    ] = None,
    prices: PriceFile = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one self-contained page.")] = None,
    json_: options.Json = False,
) -> None:
    """Compare measured, predicted and published speeds of one recipe: who is faster, and by how much.

    First what differs and whether the losses agree, then examples/s with intervals, wall time, time to a
    target and dollars. Steps/s only where all batches are equal.

    \b
    Examples:
      chipwise compare cpu.json gpu.json
      chipwise compare mine=bench/ plan.json published --baseline mine --html compare.html
      chipwise compare runs/a runs/b --target eval/accuracy=0.94 --json
    """
    from ..chips.prices import load
    from ..explain.compare import page
    from ..explain.compare.document import document
    from ..explain.compare.figures import parse
    from ..explain.compare.table import show
    from ..explain.sources import read, unpublished

    rows = read(sources)
    comparison = document(
        rows,
        prices=load(prices),
        baseline=baseline,
        target=parse(target) if target is not None else None,
        notes=unpublished(sources, rows),
    )
    if html is not None:
        page.write(comparison, html)
    if json_:
        print(json.dumps(comparison))
        return
    here = console()
    show(comparison, here)
    if html is not None:
        lines(here, f"\nwritten: {html}")
