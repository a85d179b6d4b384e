"""`chipwise find-batch RECIPE`."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..errors import DeviceError
from . import options

if TYPE_CHECKING:
    from ..find.batch import BatchSearch


def find_batch(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe (digits, mnist, ...) or path.py:name.")],
    on: Annotated[
        str | None,
        typer.Option(metavar="TARGETS", help="Absent devices, such as v5e-8,t4. [this machine's]"),
    ] = None,
    at_most: Annotated[
        int | None, typer.Option(metavar="N", help="Search no further than this batch.")
    ] = None,
    devices: options.Devices = None,
    simulate: options.Simulate = None,
    exact: options.Exact = True,
    data: options.Data = None,
    synthetic: options.Synthetic = False,
    set_: options.Set = None,
    json_: options.Json = False,
) -> None:
    """Find the largest batch that fits in memory, and say what training there would change.

    \b
    Examples:
      chipwise find-batch digits
      chipwise find-batch cifar10-davidnet --at-most 4096
      chipwise find-batch mnist --on v5e-8,t4 --json
    """
    targets: list[str | None] = [name.strip() for name in (on or "").split(",") if name.strip()] or [None]
    if on is not None and (devices is not None or simulate is not None):
        raise DeviceError(f"--on {on} asks about absent devices: leave out --devices and --simulate.")
    if on is not None:
        import jax

        jax.config.update("jax_platforms", "cpu")  # nothing here needs, or should hold, an accelerator
    count, platform = options.choose(devices, simulate)
    from ..find.batch import SCHEMA
    from ..find.batch import find_batch as find
    from ..settings import load

    settings = set_ or []
    loaded = load(recipe, settings, data, synthetic)
    found = [
        find(loaded, on=target, devices=count, platform=platform, exact=exact, at_most=at_most)
        for target in targets
    ]
    if json_:
        print(json.dumps({"schema": SCHEMA, "searches": [one.to_json() for one in found]}))
        return
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(_table(found))
    for one in found:
        _say(console, one, recipe, settings)
    console.print(
        "\nThe largest batch is not the best one: take it only where its examples/s pay for what it changes.",
        soft_wrap=True,
    )


def _table(found: list[BatchSearch]) -> Table:
    from ..plan.planner import gigabytes

    table = Table(box=None, pad_edge=False)
    for name in ("target", "batch", "a replica", "a device", "needs", "has", "bound by"):
        table.add_column(name, overflow="fold", justify="left" if name in ("target", "bound by") else "right")
    for one in found:
        counts = (one.batch, one.batch_per_replica, one.batch_per_device)
        sizes = ("-", "-")
        if one.memory is not None:
            sizes = (gigabytes(one.memory.needed), gigabytes(one.memory.available))
        table.add_row(one.target, *("-" if n is None else f"{n:,}" for n in counts), *sizes, one.bound)
    return table


def _say(console: Console, one: BatchSearch, spec: str, settings: list[str]) -> None:
    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    line(f"\n{one.target}")
    if one.memory is not None:
        line(f"- Needs and has are bytes of one device; it has {one.memory.available_source}.")
    if one.batch is not None:
        tried = "a real step was made with it" if one.confirmed else "not confirmed by a real step"
        line(f"- Batch {one.batch:,}: {tried}.")
    own, best = one.old.batch, one.batch
    speeds = one.examples_per_second
    if own in speeds and best in speeds and own != best:
        ratio = speeds[best] / speeds[own]
        line(
            f"- {speeds[best]:,.0f} examples/s at batch {best:,}, {speeds[own]:,.0f} at the recipe's own "
            f"{own:,}: {ratio:.2f} times, over a few steps."
        )
    for text in one.notes:
        line(f"- {text}")
    if one.move is not None:
        line(f"\n{one.move}")
        sets = "".join(f" --set {shlex.quote(text)}" for text in settings)
        line(f"\nNext: chipwise transfer {shlex.quote(spec)} --batch {best}{sets}")
    for finding in one.findings:
        line(f"warning: {finding}")
