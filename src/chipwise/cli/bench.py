"""`chipwise bench` and `chipwise bench-feed`: how fast a recipe trains here, and how fast its data comes."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import DataError, RecipeError, Stopped
from ..explain.terminal import console, grid, lines, table
from ..machine.hosts import hosts
from ..words.facts import fact
from ..words.figures import byte_size, counted, digits, sparkline
from . import options
from .options import option

if TYPE_CHECKING:
    from ..machine.record import Record
    from ..recipe.source import Source

PACK_BATCH = 256  # of a pack alone, which knows of no batch


@options.taking
def bench(
    recipe: options.Recipe,
    how: options.Machine,
    data: Annotated[
        str | None,
        option(
            "real: looked for, else downloaded; synthetic: made up; or a folder or URL. [real]",
            "real|synthetic|DIR",
        ),
    ] = None,
    synthetic: options.Synthetic = False,
    steps: Annotated[int | None, option("Timed steps. [about 10 seconds of them]", "N", min=1)] = None,
    warmup: Annotated[int, option("Steps before the clock, whose losses are kept.", "N", min=1)] = 50,
    set_: options.Set = None,
    predict: Annotated[
        bool, option("Measure how fast its model predicts, and one example alone.", name="--predict")
    ] = False,
    profile: Annotated[
        Path | None, option("Then trace some steps, and say which operations take the time.", "DIR")
    ] = None,
    out: Annotated[Path | None, option("The record. [bench-NAME-MACHINE.json]", "FILE.json")] = None,
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
      chipwise bench mnist --data DIR --predict
    """
    began = _process_began()
    _check_writable(out)
    on = how.on(**how.how)
    from ..measure.bench import measure_train
    from ..recipe.settings import load

    if data == "synthetic":
        data, synthetic = None, True
    data = None if data == "real" else data
    loaded = load(recipe, set_ or (), data, synthetic)
    described = {"set": list(set_ or ()), "data_note": "" if synthetic else _note(recipe, data)}
    progress = "none" if json_ else "auto"
    if predict:
        if steps is not None or profile is not None:
            raise RecipeError("bench-predict-alone")
        from ..measure.bench_predict import measure_predict

        record = measure_predict(loaded, on=on, described=described)
        _finish(record, out, "predict", _predict_rows(record), json_)
        return
    arguments: dict[str, Any] = dict(steps=steps, warmup=warmup, profile=profile, progress=progress)
    try:
        record = measure_train(loaded, on=on, **arguments, began=began, described=described)
    except KeyboardInterrupt as error:
        stopped = Stopped("bench-interrupted")
        stopped.exit_code = 130  # the shell's code for Ctrl-C
        raise stopped from error
    if not hosts().first:  # host 0 writes
        return
    _finish(record, out, "bench", _rows(record), json_)


def _finish(record: Record, out: Path | None, kind: str, rows: list[tuple[str, Any]], json_: bool) -> None:
    """Writes the record and prints it, as JSON or as `rows` of its kind."""
    out = _write(record, out, kind)
    if json_:
        print(json.dumps({**record.to_json(), "written": str(out)}))
        return
    measured, to = record.measured, console()
    devices = "bench-devices-simulated" if measured["devices"]["simulated"] else "bench-devices"
    common = [
        ("recipe", " ".join([record.name, *(f"--set {text}" for text in measured["set"])])),
        ("data", ", ".join(str(text) for text in (measured["data"], measured["data_note"]) if text)),
        ("devices", fact(devices, **measured["devices"])),
    ]
    to.print(grid([*common, *rows, ("machine", f"{record.machine.title} ({record.machine.hash})")]))
    if measured.get("profile") is not None:
        to.print()
        _profile(to, measured["profile"])
    lines(to, "", fact("written", path=out))


def _predict_rows(record: Record) -> list[tuple[str, Any]]:
    """How fast the model of a record of the kind "predict" predicts, and what the clock covered."""
    measured, alone = record.measured, record.figures["latency_seconds"]
    numbers = {"seconds": measured["seconds"]["timed"], "compile": measured["seconds"]["compile"]}
    return [
        ("speed", f"{_spread(record.figures['examples_per_second'])} examples/s"),
        ("one alone", fact("bench-alone", milliseconds=_spread(alone, 1e3), examples=len(alone.runs))),
        ("clock", fact("bench-predict-clock", block=measured["block"], **numbers)),
    ]


def _write(record: Record, out: Path | None, kind: str) -> Path:
    name = re.sub(r"[^A-Za-z0-9._]+", "-", record.name)
    out = out or Path(f"{kind}-{name}-{record.machine.hash}.json")
    record.write(out)
    return out


def _rows(record: Record) -> list[tuple[str, Any]]:
    """How fast the recipe of a record of the kind "train" trains, and what the clock covered."""
    measured, seconds = record.measured, record.measured["seconds"]
    speed, examples = record.figures["steps_per_second"], record.figures["examples_per_second"]
    losses, share = measured["first_losses"], measured["share_of_peak"]
    exact = "bench-speed" if measured["exact"] else "bench-speed-not-exact"
    recipe = {name: measured[name] for name in ("batch", "replicas", "precision")}
    shown = [f"{value:.4g}" for value in losses]
    first = ", ".join(shown if len(shown) <= 6 else [*shown[:4], "...", shown[-1]])
    return [
        ("speed", fact(exact, speed=_spread(examples), unit="examples/s", **recipe)),
        ("", fact(exact, speed=_spread(speed), unit="steps/s", **recipe)),
        ("", fact("bench-intervals", intervals=len(speed.runs), steps=measured["steps_per_interval"])),
        (
            "over time",
            f"{sparkline(speed.runs, 0.0)}  {digits(min(speed.runs))} to {digits(max(speed.runs))}",
        ),
        (
            "clock",
            fact(
                "bench-clock",
                **{name: measured[name] for name in ("timed_steps", "steps_per_call", "calibration_steps")},
                **{name: seconds[name] for name in ("timed", "start", "compile", "warmup")},
                warmup_steps=len(losses),
            ),
        ),
        ("losses", f"{first} (steps 1 to {len(losses)})"),
        ("waiting", measured["feed"]["verdict"]),
        ("memory", _memory(measured["memory_bytes_per_device"], measured["host_peak_bytes"])),
        ("share of peak", "unknown" if share is None else f"{share:.1%}"),
    ]


def _spread(series: Any, factor: float = 1.0) -> str:
    low, high = series.quartiles
    return f"{digits(factor * series.median)} ({digits(factor * low)} to {digits(factor * high)})"


def _memory(sizes: dict[str, int | None], host: int | None) -> str:
    parts = {name: size for name, size in sizes.items() if name not in ("peak_measured", "available")}
    each = [f"{name} {'unknown' if size is None else byte_size(size)}" for name, size in parts.items()]
    total = sum(size for size in parts.values() if size is not None)
    facts = [fact("bench-memory", total=total, parts=each)]
    if sizes["peak_measured"] is not None:
        code = "bench-memory-peak" if sizes["available"] is None else "bench-memory-peak-of"
        facts.append(fact(code, peak=sizes["peak_measured"], available=sizes["available"]))
    if host is not None:
        facts.append(fact("bench-memory-host", peak=host))
    return "; ".join(map(str, facts))


def _profile(to: Console, profile: dict[str, Any]) -> None:
    if profile["operations"]:
        columns = ("operation", "category", "share", "count a step", "ms a step", "in the model")
        cells = []
        for one in profile["operations"]:
            source = "/".join(one["source"].split("/")[-2:])
            figures = f"{one['share']:.1%}", f"{one['count']:.3g}", f"{one['milliseconds']:.3g}"
            cells.append([one["name"], one["category"], *figures, source])
        words = (*columns[:2], columns[-1])
        rows = table(columns, cells, left=words, fold=columns[-1:], padding=(0, 2))
        rows.columns[0].overflow, rows.columns[0].max_width = "ellipsis", 44
        to.print(rows)
        shares = [f"{name} {share:.0%}" for name, share in profile["share"].items() if share >= 0.005]
        lines(to, fact("profile-sum", milliseconds=profile["milliseconds_per_step"], shares=shares))
    else:
        lines(to, fact("profile-empty", steps=profile["steps"]))
    lines(to, fact("profile-browse", folder=shlex.quote(profile["folder"])))


def _check_writable(out: Path | None) -> None:
    """Raises `DataError` now for a place that would refuse the record after the measurement."""
    to = out or Path("bench.json")
    folder = next(parent for parent in to.absolute().parents if parent.exists())
    if to.is_dir():
        raise DataError("record-is-folder", path=to)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise DataError("record-folder-closed", path=to, folder=folder)


def _note(recipe: str, data: str | None) -> str:
    """What must be said beside every figure measured on this data set, or ""."""
    from ..data.datasets import cifar10

    return cifar10(data).note if recipe.startswith("cifar10-") else ""


def _process_began() -> float:
    """What `time.perf_counter()` was, or would have been, when this process started."""
    import psutil

    return time.perf_counter() - (time.time() - psutil.Process().create_time())


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
        int | None, option("For a pack of encoded images: decode to N × N pixels.", "N", min=1)
    ] = None,
    batch: Annotated[
        int | None, option(f"Examples read at once. [the recipe's; {PACK_BATCH} for a pack]", min=1)
    ] = None,
    seconds: Annotated[float, option("How long to measure, in all.", min=0.01)] = 10.0,
    workers: Annotated[
        str | None, option("Compare one worker with N. [cores]", "N|threads:N|processes:N")
    ] = None,
    out: Annotated[Path | None, option("The record. [feed-NAME-MACHINE.json]", "FILE.json")] = None,
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
    on = options.Here(devices).on()
    from ..machine.detect import detect
    from ..measure.feed import measure_feed, verdict

    source, name, examples, described = _source(what, data, set_, size)
    record = measure_feed(
        source,
        batch or examples,
        name=name,
        seconds=seconds,
        workers=workers,
        devices=detect(on.devices, on.platform).devices,
        described=described,
    )
    out = _write(record, out, "feed")
    findings = verdict(record)
    if json_:
        conclusions = [finding.json() for finding in findings]
        print(json.dumps({**record.to_json(), "verdict": conclusions, "written": str(out)}))
        return
    to = console()
    to.print(_feed_table(record))
    lines(to, "", " ".join(map(str, findings)), fact("written", path=out))


def _source(
    what: str, data: str | None, set_: list[str] | None, size: int | None
) -> tuple[Source, str, int, dict[str, str]]:
    """A recipe's training data or a pack: the source, its name, examples to read at once, what it is."""
    from ..data import remote
    from ..data.packed import PackedFolder
    from ..recipe.settings import load
    from ..recipes import BUILT_IN

    source: Source
    folder = Path(what) if what in BUILT_IN else remote.local(what)
    if what not in BUILT_IN and folder.is_dir():
        if data is not None or set_:
            raise RecipeError("pack-is-no-recipe", pack=what)
        source, name, batch = PackedFolder(folder, size=size), folder.resolve().name, PACK_BATCH
        described = {"path": what}
    else:
        if size is not None:
            raise RecipeError("size-is-for-packs", recipe=what)
        recipe = load(what, set_ or (), data)
        source, name, batch, described = recipe.task.train, recipe.name, recipe.batch, {"recipe": what}
    if hasattr(source, "store"):
        described["store"] = source.store
    return source, name, batch, described


def _feed_table(record: Record) -> Table:
    """A row a figure: median and quartiles of examples/s and GB/s, and the share of a plain copy."""
    from ..measure.feed import STAGES

    columns = ("", "examples/s", "quartiles", "GB/s", "of a copy", "ms an example")
    rows = table(columns, left=("",), padding=(0, 2))
    size, figures = record.measured["bytes_per_example"], record.figures

    def rate(series: Any, unit: float = 1.0) -> tuple[str, str, str]:
        """Of a series in examples/s, or of `unit` bytes/s."""
        middle, low, high = (_number(x / unit) for x in (series.median, *series.quartiles))
        return middle, f"{low} to {high}", f"{series.median / unit * size / 1e9:.3g}"

    for count in record.measured["workers"]:
        read, copy = figures[f"examples_per_second.{count}"], figures[f"copy_bytes_per_second.{count}"]
        share, each = f"{read.median * size / copy.median:.0%}", f"{1e3 * count / read.median:.3g}"
        rows.add_row(counted(count, "worker"), *rate(read), share, each)
        rows.add_row(f"  plain copy, {counted(count, 'thread')}", *rate(copy, size), "", "", end_section=True)
    for stage in STAGES:
        seconds = figures[f"seconds_per_example.{stage}"].median
        if seconds:
            rows.add_row(f"  {stage}, one worker", "", "", "", "", f"{seconds * 1e3:.3g}")
    if "transfer_bytes_per_second" in figures:
        rows.add_row("transfer to the device", *rate(figures["transfer_bytes_per_second"], size), "", "")
    return rows


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
