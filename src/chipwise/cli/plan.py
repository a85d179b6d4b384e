"""`chipwise plan RECIPE --on TARGETS`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..words.facts import fact
from . import options
from .chips import PriceFile
from .terminal import console, lines

EVERYTHING = "v2-8,v3-8,v4-8,v5e-8,v5p-8,v6e-8,tpu7x-8,t4,v100,a100,h100"


def plan(
    recipe: options.Recipe,
    on: Annotated[
        str, typer.Option(metavar="TARGETS", help="Such as v5e-8,v3-8,a100,h100:8,t4,cpu.")
    ] = EVERYTHING,
    data: options.Data = None,
    set_: options.Set = None,
    exact: Annotated[bool, typer.Option(help="As for train: the same bits on any number of devices.")] = True,
    prices: PriceFile = None,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Also search for the largest batch that fits each target.")
    ] = False,
    host_cores: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Cores of the hosts that feed. [this host's]")
    ] = None,
    feed_record: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="By chipwise bench-feed, on the host that would feed."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one self-contained page.")] = None,
    json_: options.Json = False,
) -> None:
    """Predict, before renting: does it fit, how fast is it, what does it cost.

    \b
    Examples:
      chipwise plan mnist --on v5e-8,v6e-8,v3-8,a100,h100:8,t4,v100
      chipwise plan cifar10-davidnet --set batch=1024 --on v2-8,t4 --html plan.html
      chipwise plan my_task.py:recipe --on v5e-1 --largest-batch --json
    """
    options.only_look()
    from ..explain.plan import page
    from ..explain.plan.text import document, parts
    from ..planner.planner import plan as make
    from ..recipe.settings import load

    loaded = load(recipe, set_ or (), data)
    bar = Progress(
        TextColumn("[bold]compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.description}"), console=Console(stderr=True), transient=True, disable=json_,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=None, visible=False)

        def progress(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name, visible=True)

        plans = make(
            loaded,
            [name for name in on.split(",") if name.strip()],
            prices=prices,
            exact=exact,
            find_largest_batch=largest_batch,
            measure_feed=data is not None,
            feed_record=feed_record,
            host_cores=host_cores,
            progress=progress,
        )
    answer = document(loaded, plans)
    if html is not None:
        page.write(answer, html)
    if json_:
        print(json.dumps(answer))
        return
    to = console()
    for part in parts(plans):
        to.print(part, markup=False, soft_wrap=True)
    if html is not None:
        lines(to, "", fact("written", path=html))
