"""`chipwise train RECIPE`."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import options


def train(
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
    exact: Annotated[
        bool, typer.Option(help="Add in a fixed order: the same bits on any number of devices.")
    ] = True,
    eval_every: Annotated[
        str, typer.Option(metavar="DURATION", help="Such as 1ep, 500st, 10%, or 'end'.")
    ] = "1ep",
    log_every: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Between lines of metrics. [4% of the run, at most 200st]"),
    ] = None,
    checkpoint_every: Annotated[
        str | None, typer.Option(metavar="DURATION", help="[5% of the run, at least 30 seconds apart]")
    ] = None,
    stop_after: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Stop there, saved, with the schedules unchanged.")
    ] = None,
    feed: Annotated[
        str,
        typer.Option(metavar="auto|device|host", help="Keep the training data on the device, or stream it."),
    ] = "auto",
    workers: options.Workers = None,
    steps_per_call: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --no-exact, one device and data on it. [by trial]"),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard a run found in the folder.")] = False,
    json_: options.Json = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="No progress, only warnings and the result.")
    ] = False,
) -> None:
    """Train a recipe on every device found.

    \b
    Examples:
      chipwise train digits
      chipwise train mnist --data DIR --set seed=1 --run runs/mnist-1
      chipwise train digits --simulate 8 --json
      chipwise train my_task.py:recipe --set lr=0.2 --devices 4
    """
    count, platform = options.choose(devices, simulate)
    from ..settings import load
    from ..train.loop import fit

    made = load(recipe, set_ or (), data, synthetic)
    if run is None:
        run = f"runs/{made.name}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    console = Console(stderr=True, highlight=False)
    if not quiet:
        console.print(_table(made.rows()))
    spec, _, name = recipe.partition(":")
    spec = f"{Path(spec).absolute()}:{name}" if Path(spec).suffix == ".py" else recipe
    result = fit(
        made,
        run,
        devices=count,
        platform=platform,
        exact=exact,
        eval_every=None if eval_every == "end" else eval_every,
        log_every=log_every,
        checkpoint_every=checkpoint_every,
        stop_after=stop_after,
        fresh=fresh,
        feed=feed,
        workers=workers,
        steps_per_call=steps_per_call,
        progress="none" if quiet else "auto",
        source={
            "recipe": spec,
            "set": list(set_ or ()),
            "data": data and str(Path(data).absolute()),
            **({"synthetic": True} if synthetic else {}),
        },
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
    Console(highlight=False).print(_table(rows))


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table
