"""`chipwise bench RECIPE`."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import DataError, Stopped
from ..words.figures import byte_size, counted, digits, sparkline
from . import options


def bench(
    recipe: Annotated[str, typer.Argument(help="A built-in recipe (digits, mnist, ...) or path.py:name.")],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="real|synthetic|DIR",
            help="real: looked for, else downloaded; synthetic: made up; or a folder or URL. [real]",
        ),
    ] = None,
    synthetic: options.Synthetic = False,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Timed steps. [about 10 seconds of them]")
    ] = None,
    warmup: Annotated[
        int, typer.Option(min=1, metavar="N", help="Steps before the clock, whose losses are kept.")
    ] = 50,
    set_: options.Set = None,
    devices: options.Devices = None,
    simulate: options.Simulate = None,
    exact: options.Exact = True,
    feed: options.Feed = "auto",
    workers: options.Workers = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Then trace some steps, and say which operations take the time."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="The record. [bench-NAME-MACHINE.json]")
    ] = None,
    json_: options.Json = False,
) -> None:
    """Measure how fast a recipe trains here, and save a record to compare with others.

    Warm-up and compilation are timed apart, speed over ten or more intervals; evaluation takes no part. The
    record, a JSON file in the current folder unless --out says otherwise, also holds the losses of the first
    steps: two records agree in them before their speeds mean anything.

    \b
    Examples:
      chipwise bench digits
      chipwise bench cifar10-resnet32 --data synthetic --steps 100
      chipwise bench mnist --data DIR --set batch=512 --profile trace
    """
    began = _process_began()
    _check_writable(out)
    on = options.on(devices, simulate, exact=exact, feed=feed, workers=workers)
    from ..machine.report import grid
    from ..measure.bench import measure_train
    from ..recipe.settings import load

    if data == "synthetic":
        data, synthetic = None, True
    data = None if data == "real" else data
    made = load(recipe, set_ or (), data, synthetic)
    try:
        record = measure_train(
            made,
            steps=steps,
            warmup=warmup,
            on=on,
            profile=profile,
            progress="none" if json_ else "auto",
            began=began,
            described={"set": list(set_ or ()), "data_note": "" if synthetic else _note(recipe, data)},
        )
    except KeyboardInterrupt as error:
        stopped = Stopped("interrupted: no record is written.")
        stopped.exit_code = 130  # the shell's code for Ctrl-C
        raise stopped from error
    if out is None:
        out = Path(f"bench-{re.sub(r'[^A-Za-z0-9._]+', '-', record.name)}-{record.machine.hash}.json")
    record.write(out)
    if json_:
        print(json.dumps({**record.to_json(), "written": str(out)}))
        return
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(grid(rows(record)))
    if profile is not None:
        console.print()
        _show_profile(console, record.measured["profile"])
    console.print()
    console.print(f"written: {out}", markup=False)


def rows(record: Any) -> list[tuple[str, str]]:
    """A record of the kind "train" as lines to read: what, how fast, and what the clock covered."""
    told, speed = record.measured, record.figures["steps_per_second"]
    batch = (
        f"batch {told['batch']}, {counted(told['replicas'], 'replica')}, "
        f"{told['precision']}{'' if told['exact'] else ', not exact'}"
    )
    found, chips = told["seconds"], told["devices"]
    simulated = " (simulated)" if chips["simulated"] else ""
    losses, share = told["first_losses"], told["share_of_peak"]
    per_call = f", {told['steps_per_call']} a call" * (told["steps_per_call"] > 1)
    each = f"{counted(len(speed.runs), 'interval')} of {counted(told['steps_per_interval'], 'step')}"
    note = f", {told['data_note']}" if told["data_note"] else ""
    return [
        ("recipe", " ".join([record.name, *(f"--set {text}" for text in told["set"])])),
        ("data", f"{told['data']}{note}"),
        ("devices", f"{chips['platform']}: {chips['count']} × {chips['kind']}{simulated}"),
        ("speed", f"{_spread(record.figures['examples_per_second'])} examples/s at {batch}"),
        ("", f"{_spread(speed)} steps/s at {batch}"),
        ("", f"median and quartiles of {each}"),
        (
            "over time",
            f"{sparkline(speed.runs, 0.0)}  {digits(min(speed.runs))} to {digits(max(speed.runs))}",
        ),
        (
            "clock",
            f"{counted(told['timed_steps'], 'step')} in {found['timed']:.1f} s{per_call}; "
            f"before it: start {found['start']:.1f} s, compile {found['compile']:.1f} s, "
            f"{counted(len(losses), 'step')} of warm-up and {told['calibration_steps']} of calibration "
            f"{found['warmup']:.1f} s; no evaluation, no checkpoints",
        ),
        ("losses", f"{_some(losses)} (steps 1 to {len(losses)})"),
        ("waiting", told["feed"]["verdict"]),
        ("memory", _memory(told["memory_bytes_per_device"], told["host_peak_bytes"])),
        ("share of peak", "unknown" if share is None else f"{share:.1%}"),
        ("machine", f"{record.machine.title} ({record.machine.hash})"),
    ]


def _spread(series: Any) -> str:
    low, high = series.quartiles
    return f"{digits(series.median)} ({digits(low)} to {digits(high)})"


def _some(values: list[float]) -> str:
    shown = [f"{value:.4g}" for value in values]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:4], "...", shown[-1]])


def _memory(found: dict[str, int | None], host: int | None) -> str:
    parts = {name: size for name, size in found.items() if name not in ("peak_measured", "available")}
    known = [size for size in parts.values() if size is not None]
    text = f"{byte_size(sum(known))} a device: "
    text += ", ".join(
        f"{name} {'unknown' if size is None else byte_size(size)}" for name, size in parts.items()
    )
    if found["peak_measured"] is not None:
        text += f"; measured at most {byte_size(found['peak_measured'])}"
        text += f" of {byte_size(found['available'])}" if found["available"] is not None else ""
    return text + (f"; this process on the host at most {byte_size(host)}" if host is not None else "")


def _show_profile(console: Console, found: dict[str, Any]) -> None:
    from rich.text import Text

    if not found["operations"]:
        console.print(f"The trace of {found['steps']} steps names no operation.", markup=False)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2))
    table.add_column("operation", overflow="ellipsis", no_wrap=True, max_width=44)
    table.add_column("category", no_wrap=True)
    for title in ("share", "count a step", "ms a step"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("in the model", overflow="fold")
    for operation in found["operations"]:
        table.add_row(
            Text(operation["name"]),
            operation["category"],
            f"{operation['share']:.1%}",
            f"{operation['count']:.3g}",
            f"{operation['milliseconds']:.3g}",
            Text("/".join(operation["source"].split("/")[-2:])),
        )
    if found["operations"]:
        console.print(table)
        console.print(
            f"{found['milliseconds_per_step']:.3g} ms of operations a step: "
            + ", ".join(f"{name} {share:.0%}" for name, share in found["share"].items() if share >= 0.005)
        )
    console.print(f"to browse it: tensorboard --logdir {shlex.quote(found['folder'])}", markup=False)


def _check_writable(out: Path | None) -> None:
    """Raises `DataError` now for a place that would refuse the record after the measurement."""
    to = out or Path("bench.json")
    folder = next(parent for parent in to.absolute().parents if parent.exists())
    if to.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "it is a folder" if to.is_dir() else f"{folder} is no folder that one may write to"
        raise DataError(f"{to}: the record cannot be written there ({why}). Give --out FILE.json.")


def _note(recipe: str, data: str | None) -> str:
    """What must be said beside every figure measured on this data set, or ""."""
    from ..data.datasets import cifar10

    return cifar10(data).note if recipe.startswith("cifar10-") else ""


def _process_began() -> float:
    """`time.perf_counter()` as it was, or would have been, when this process started."""
    import psutil

    return time.perf_counter() - (time.time() - psutil.Process().create_time())
