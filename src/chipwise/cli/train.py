"""`chipwise train RECIPE`."""

from __future__ import annotations

import datetime
import json
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import RecipeError
from . import options
from .sweep import study


def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A built-in recipe (digits, mnist, ...) or path.py:name.")],
    run: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Run folder; one that holds a run is resumed. [runs/NAME-TIME]"),
    ] = None,
    data: options.Data = None,
    synthetic: options.Synthetic = False,
    set_: options.Set = None,
    devices: options.Devices = None,
    simulate: options.Simulate = None,
    exact: options.Exact = True,
    eval_every: options.EvalEvery = "1ep",
    log_every: options.LogEvery = None,
    checkpoint_every: options.CheckpointEvery = None,
    stop_after: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Stop there, saved, with the schedules unchanged.")
    ] = None,
    feed: options.Feed = "auto",
    workers: options.Workers = None,
    steps_per_call: options.StepsPerCall = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N|LIST",
            help="A run a seed, and their spread: 5 being the seeds 0 to 4, or a list such as 0,3,7.",
        ),
    ] = None,
    at_once: options.AtOnce = 1,
    metric: options.Metric = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard a run found in the folder.")] = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a recipe on every device found.

    \b
    Examples:
      chipwise train digits
      chipwise train mnist --data DIR --set seed=1 --run runs/mnist-1
      chipwise train digits --simulate 8 --json
      chipwise train my_task.py:recipe --set lr=0.2 --devices 4
      chipwise train mnist --data DIR --seeds 5 --run runs/mnist-5
    """
    how: dict[str, Any] = dict(
        on=options.on(devices, simulate, exact=exact, feed=feed, workers=workers),
        eval_every=None if eval_every == "end" else eval_every,
        log_every=log_every,
        checkpoint_every=checkpoint_every,
        steps_per_call=steps_per_call,
    )
    if seeds is not None:
        _seeds_go_with(stop_after, fresh, set_)
        study(
            context,
            recipe,
            {},
            seeds=seeds,
            run=run,
            at_once=at_once,
            metric=metric,
            json_=json_,
            quiet=quiet,
            set=set_ or (),
            data=data,
            synthetic=synthetic,
            **how,
        )
        return
    if at_once != 1 or metric is not None:
        raise RecipeError("--at-once and --metric are for several runs: give --seeds, such as --seeds 5.")
    from ..engine.fit import fit
    from ..machine.report import grid
    from ..study.runs import Origin

    origin = Origin(recipe, tuple(set_ or ()), data, synthetic)
    made = origin.make()
    if run is None:
        run = f"runs/{made.name}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    console = Console(stderr=True, highlight=False)
    if not quiet:
        console.print(grid(made.rows()))
    result = fit(
        made,
        run,
        **how,
        stop_after=stop_after,
        fresh=fresh,
        progress="none" if quiet else "auto",
        source=origin.source(),
    )
    if json_:
        print(json.dumps(result.to_json()))
        return
    rows = [(k, f"{v:.6g}") for k, v in result.metrics.items() if isinstance(v, float)]
    speed = result.speed
    if speed.get("examples_per_second"):
        low, high = speed["examples_per_second_quartiles"]
        median = speed["examples_per_second"]
        rows.append(("speed", f"{median:,.0f} examples/s ({low:,.0f} to {high:,.0f}) at batch {made.batch}"))
    share = speed["share_of_peak"]
    rows.append(("share of peak", share if isinstance(share, str) else f"{share:.1%}"))
    rows.append(("seconds", ", ".join(f"{k} {v:.1f}" for k, v in result.seconds.items())))
    if result.feed:
        rows.append(("data", result.feed["verdict"]))
    rows += [("fingerprint", result.fingerprint), ("run", str(result.run))]
    Console(highlight=False).print(grid(rows))


def _seeds_go_with(stop_after: str | None, fresh: bool, set_: list[str] | None) -> None:
    """Raises `RecipeError` for what makes no sense for several runs in a folder."""
    if stop_after is not None:
        raise RecipeError("--stop-after with --seeds: a study compares runs that are done. Leave one out.")
    if fresh:
        raise RecipeError("--fresh with --seeds: name another folder with --run, or delete that one.")
    if any(text.partition("=")[0].strip() == "seed" for text in set_ or ()):
        raise RecipeError("--set seed=... with --seeds: name the seeds themselves, such as --seeds 3,7.")
