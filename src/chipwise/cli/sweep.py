"""`chipwise sweep RECIPE --set KEY=VALUE,VALUE`, and the studies of `chipwise train RECIPE --seeds N`."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import DivergedError, Stopped
from . import options
from .again import again


def sweep(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A built-in recipe (digits, mnist, ...) or path.py:name.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE,VALUE",
            help="Values of a setting; may be repeated, every combination is trained.",
        ),
    ] = None,
    seeds: Annotated[
        str, typer.Option(metavar="N|LIST", help="Their number, 3 being 0 to 2, or a list such as 0,3,7.")
    ] = "3",
    run: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="The study's folder; what it holds is not repeated. [runs/NAME-TIME]"
        ),
    ] = None,
    at_once: options.AtOnce = 1,
    metric: options.Metric = None,
    data: options.Data = None,
    synthetic: options.Synthetic = False,
    devices: options.Devices = None,
    simulate: options.Simulate = None,
    exact: options.Exact = True,
    eval_every: options.EvalEvery = "1ep",
    log_every: options.LogEvery = None,
    checkpoint_every: options.CheckpointEvery = None,
    feed: options.Feed = "auto",
    workers: options.Workers = None,
    steps_per_call: options.StepsPerCall = None,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train every combination of settings with several seeds, and compare them.

    \b
    Examples:
      chipwise sweep mnist --set lr=0.005,0.01,0.02 --seeds 3 --run runs/mnist-lr
      chipwise sweep digits --set lr=1e-3,3e-3 --set batch=32,64 --seeds 5 --at-once 2
      chipwise sweep my_task.py:recipe --set warmup=5ep,10ep --metric eval/f1_macro --json

    A comma in brackets or quotes, or after a backslash, belongs to the value. The same command with the same
    --run goes on after a stop, and more values or seeds extend it.
    """
    from ..study.grid import parse

    study(
        context,
        recipe,
        parse(set_ or ()),
        seeds=seeds,
        run=run,
        at_once=at_once,
        metric=metric,
        json_=json_,
        quiet=quiet,
        data=data,
        synthetic=synthetic,
        on=options.on(devices, simulate, exact=exact, feed=feed, workers=workers),
        eval_every=None if eval_every == "end" else eval_every,
        log_every=log_every,
        checkpoint_every=checkpoint_every,
        steps_per_call=steps_per_call,
    )


def study(
    context: typer.Context,
    recipe: str,
    settings: dict[str, list[str]],
    *,
    seeds: str,
    run: str | None,
    metric: str | None,
    json_: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Trains a study and prints its table. Raises `DivergedError` when every run of it diverged."""
    from ..explain.study_table import main_metric, notes, render, rows
    from ..study import grid
    from ..study.sweep import sweep

    if run is None:
        file, _, name = recipe.partition(":")
        run = f"runs/{Path(name or file).stem}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"

    def show(made, to) -> None:
        console = Console(file=to, highlight=False, width=None if to.isatty() else 160)
        console.print(render(made, metric))
        for text in notes(made, metric):
            console.print(text, markup=False, soft_wrap=True)

    def after_round(made) -> None:
        rows(made, metric)  # a metric that nothing has is known after the first round, not the last
        if not quiet and not all(run.ended for point in made.points for run in point.runs.values()):
            show(made, sys.stderr)

    try:
        made = sweep(
            recipe,
            settings,
            seeds=grid.seeds(seeds),
            run=run,
            progress="none" if quiet else "auto",
            after_round=after_round,
            **given,
        )
    except Stopped as error:
        raise Stopped(f"{error} Go on: {again(context, run=run)}") from None
    if json_:
        shown = {"run": str(made.folder), "metric": metric or main_metric(made), **made.to_json()}
        print(json.dumps({**shown, "rows": [row.to_json() for row in rows(made, metric)]}))
    else:
        show(made, sys.stdout)
        print(f"run  {made.folder}")
    if not any(run.done for point in made.points for run in point.runs.values()):
        raise DivergedError(f"Every run of {made.folder} diverged. Try lower rates (--set lr=...).")
