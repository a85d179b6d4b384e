"""`chipwise plan RECIPE --on TARGETS`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..explain.terminal import answer
from . import options

EVERYTHING = "v2-8,v3-8,v4-8,v5e-8,v5p-8,v6e-8,tpu7x-8,t4,v100,a100,h100"


@options.taking
def plan(
    recipe: options.Given,
    on: Annotated[
        str, typer.Option(metavar="TARGETS", help="Such as v5e-8,v3-8,a100,h100:8,t4,cpu.")
    ] = EVERYTHING,
    exact: options.Exact = True,
    prices: options.Prices = None,
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
    html: options.Html = None,
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
    from ..explain import plan_page
    from ..explain.plan import document, parts
    from ..planner.planner import plan as make

    loaded = recipe.load()
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
            measure_feed=recipe.data is not None,
            feed_record=feed_record,
            host_cores=host_cores,
            progress=progress,
        )
    shown = document(loaded, plans)
    answer(shown, parts(plans), lambda: plan_page.render(shown), html, json_)
