"""`chipwise bench-feed RECIPE|PACK`."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..words.figures import counted
from . import options

PACK_BATCH = 256  # of a pack alone, which knows of no batch


def bench_feed(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|PACK", help="A recipe, or a folder made by chipwise pack, or its URL."
        ),
    ],
    data: options.Data = None,
    set_: options.Set = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="Of a pack of encoded images: decode to so many pixels square.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help=f"Examples read at once. [the recipe's; {PACK_BATCH} for a pack]"),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long to measure, in all.")] = 10.0,
    workers: Annotated[
        str | None,
        typer.Option(metavar="N|threads:N|processes:N", help="Compare one worker with so many. [cores]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="The record. [feed-NAME-MACHINE.json]")
    ] = None,
    devices: options.Devices = None,
    json_: options.Json = False,
) -> None:
    """Measure how fast this host alone reads, decodes and transforms examples, and save a record.

    One worker and all of them, beside plain memory copies in the same run. The record, a JSON file in the
    current folder unless --out says otherwise, can stand in for a measurement on that host:
    chipwise plan RECIPE --feed-record FILE.json

    \b
    Examples:
      chipwise bench-feed cifar10-davidnet --data /data
      chipwise bench-feed packed/flowers --batch 512 --seconds 30
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the device only receives some batches
    on = options.on(devices, None)
    from ..data import remote
    from ..data.packed import PackedFolder
    from ..errors import RecipeError
    from ..machine.detect import detect
    from ..measure.feed import measure_feed, verdict
    from ..recipe.settings import load
    from ..recipe.task import Source
    from ..recipes import BUILT_IN

    source: Source
    described: dict[str, str] = {}
    place = Path(what) if what in BUILT_IN else remote.local(what)
    if what not in BUILT_IN and place.is_dir():
        if data is not None or set_:
            raise RecipeError(
                f"{what} is a packed folder: leave out --data and --set, which are for recipes."
            )
        source, name = PackedFolder(place, size=size), place.resolve().name
        described["path"] = what
    else:
        if size is not None:
            raise RecipeError(f"--size is for packed folders, and {what} is a recipe: leave it out.")
        recipe = load(what, set_ or (), data)
        source, name, batch = recipe.task.train, recipe.name, batch or recipe.batch
        described["recipe"] = what
    if hasattr(source, "store"):
        described["store"] = source.store
    machine = detect(on.devices, on.platform)
    record = measure_feed(
        source,
        batch or PACK_BATCH,
        name=name,
        seconds=seconds,
        workers=workers,
        devices=machine.devices,
        described=described,
    )
    if out is None:
        out = Path(f"feed-{re.sub(r'[^A-Za-z0-9._]+', '-', name)}-{record.machine.hash}.json")
    record.write(out)
    findings = verdict(record)
    if json_:
        print(
            json.dumps(
                {**record.to_json(), "verdict": [finding.json() for finding in findings], "written": str(out)}
            )
        )
        return
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(_table(record))
    console.print()
    console.print(" ".join(map(str, findings)), markup=False)
    console.print(f"written: {out}", markup=False)


def _table(record) -> Table:
    """A row a figure: median and quartiles of examples/s and GB/s, and the share of a plain copy."""
    from ..measure.feed import STAGES

    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2))
    made.add_column("")
    for title in ("examples/s", "quartiles", "GB/s", "of a copy", "ms an example"):
        made.add_column(title, justify="right", no_wrap=True)
    size, figures = record.measured["bytes_per_example"], record.figures
    for count in record.measured["workers"]:
        rate, copy = figures[f"examples_per_second.{count}"], figures[f"copy_bytes_per_second.{count}"]
        made.add_row(
            counted(count, "worker"),
            _number(rate.median),
            f"{_number(rate.quartiles[0])} to {_number(rate.quartiles[1])}",
            f"{rate.median * size / 1e9:.3g}",
            f"{rate.median * size / copy.median:.0%}",
            f"{1e3 * count / rate.median:.3g}",
        )
        made.add_row(
            f"  plain copy, {counted(count, 'thread')}", *_bytes_row(copy, size), "", "", end_section=True
        )
    for stage in STAGES:
        each = figures[f"seconds_per_example.{stage}"].median
        if each:
            made.add_row(f"  {stage}, one worker", "", "", "", "", f"{each * 1e3:.3g}")
    if "transfer_bytes_per_second" in figures:
        made.add_row(
            "transfer to the device", *_bytes_row(figures["transfer_bytes_per_second"], size), "", ""
        )
    return made


def _bytes_row(series, size: int) -> tuple[str, str, str]:
    low, high = series.quartiles
    return (
        _number(series.median / size),
        f"{_number(low / size)} to {_number(high / size)}",
        f"{series.median / 1e9:.3g}",
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
