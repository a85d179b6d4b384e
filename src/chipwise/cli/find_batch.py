"""`chipwise find-batch RECIPE`."""

from __future__ import annotations

import json
import statistics
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..errors import DeviceError
from ..words.figures import digits, listed
from . import options
from .transfer import apply_lines

if TYPE_CHECKING:
    from ..study.find_batch import BatchSearch


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
    where = options.on(devices, simulate, exact=exact)
    from ..chips.targets import parse
    from ..recipe.settings import load
    from ..study.find_batch import SCHEMA
    from ..study.find_batch import find_batch as find

    for name in filter(None, targets):
        parse(name)  # a target that cannot be is said before the work on those before it
    settings = set_ or []
    loaded = load(recipe, settings, data, synthetic)
    progress = "none" if json_ else "auto"
    found = [
        find(
            loaded, target=target, on=where, at_most=at_most,
            progress=progress,
        )
        for target in targets
    ]  # fmt: skip
    if json_:
        print(json.dumps({"schema": SCHEMA, "searches": [one.to_json() for one in found]}))
        return
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(_table(found))
    for one in found:
        _say(console, one)
    for batch in dict.fromkeys(one.batch for one in found if one.batch is not None):
        _move(console, [one for one in found if one.batch == batch], recipe, settings, data)
    console.print(
        "\nThe largest batch is not the best one: take it only where its examples/s pay for what it changes.",
        soft_wrap=True,
    )


def _table(found: list[BatchSearch]) -> Table:
    from ..planner.planner import gigabytes

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


def _say(console: Console, one: BatchSearch) -> None:
    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    line(f"\n{one.target}")
    if one.memory is not None:
        line(f"- Needs and has are bytes of one device; it has {one.memory.available_source}.")
    if one.batch is not None:
        tried = "real steps were made with it" if one.confirmed else "not confirmed by a real step"
        line(f"- Batch {one.batch:,}: {tried}.")
    for text in _speeds(one):
        line(f"- {text}.")
    for text in one.notes:
        line(f"- {text}")


def _speeds(one: BatchSearch) -> list[str]:
    """How fast each batch is, and what the larger one gains."""
    own, said = one.old.batch, []
    for batch, speeds in one.examples_per_second.items():
        spread = f" ({digits(min(speeds))} to {digits(max(speeds))} in {len(speeds)} rounds)"
        mean = digits(statistics.geometric_mean(speeds))
        whose = ", the recipe's own" if batch == own else ""
        said.append(f"{mean} examples/s at batch {batch:,}{whose}{spread if len(speeds) > 1 else ''}")
    for batch, speed in one.predicted.items():
        whose = ", the recipe's own" if batch == own else ""
        interval = f"({digits(speed.low)} to {digits(speed.high)})"
        said.append(f"Predicted: {digits(speed.value)} examples/s at batch {batch:,}{whose} {interval}")
    gain = one.speedup
    if gain is not None:
        text = f"Batch {one.batch:,} makes {gain.value:.2f} times the examples/s of {own:,}"
        if gain.low is None or gain.high is None:
            said.append(f"{text}, in one round each")
        else:
            told = ": no difference shown" if gain.low <= 1 <= gain.high else ""
            said.append(f"{text} ({gain.low:.2f} to {gain.high:.2f}){told}")
    return said


def _move(
    console: Console, same: list[BatchSearch], spec: str, settings: list[str], data: str | None
) -> None:
    """What it means to train at a batch, once for all targets that it was found for."""

    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    one = same[0]
    if one.move is not None:
        line(f"\nAt batch {one.batch:,}, on {listed([each.target for each in same])}:\n\n{one.move}")
    for text in dict.fromkeys(str(finding) for each in same for finding in each.findings):
        line(f"\nwarning: {text}")
    if one.move is not None:
        line(f"\nNext: {apply_lines(spec, one.move.recipe, {'--batch': one.batch}, settings, data)}")
