"""`chipwise bench`: the speed of training on this machine."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import DataError, DeviceError, Fact, fact, invalid, plain
from ..base.figures import byte_size, digits, sparkline
from ..base.files import replace_file
from ..explain.terminal import console, grid, lines
from ..machine.hosts import hosts
from . import options
from .options import flag, option
from .standard_output import print_json

if TYPE_CHECKING:
    from ..machine.record import Record
    from ..recipe.recipe import Recipe


@options.taking
def bench(
    given: options.Given,
    how: options.Hardware,
    steps: int | None = option("Timed steps. [about 10 seconds of them]", "N", min=1),
    warmup: int | None = option(
        "Steps before the timed ones; their losses are kept. [50]", "N", min=1
    ),
    out: Path | None = option("The record. [bench-NAME-MACHINE.json]", "FILE.json"),
    plan: bool = option(
        "Plan the recipe for this chip and say which share of that speed it has. [plan]",
        default=True,
        name="--plan/--no-plan",
    ),
    row: bool = flag("Also write a row for the table of plan accuracy, beside the record."),
    json_: bool = options.JSON,
) -> None:
    """Measure how fast a recipe trains here, and save a record to compare with others.

    Warm-up and compilation are timed separately. The speed is measured over ten or more intervals,
    without evaluation. The record also has the losses of the first steps. Compare the speeds of two
    records only if these agree.

    On a GPU or TPU of the catalogue, the recipe is then planned for it: its compiler runs for a
    minute or more. A speed below the planned range comes with what was found: clocks, power limit,
    PCIe link, other processes, waiting for data.

    \b
    Examples:
      chipwise bench digits
      chipwise bench cifar10-davidnet --synthetic --steps 100
      chipwise bench mnist --data DIR --set batch=512 --feed host
      chipwise bench gpt2-124m --synthetic --row

    The largest batch that fits a chip: chipwise plan RECIPE --on v5e-8 --largest-batch.
    """
    import jax
    import psutil

    # The value of `time.perf_counter()` when this process started
    began = time.perf_counter() - (time.time() - psutil.Process().create_time())
    _check_writable(out)
    if row and out is not None and (out.suffix == ".csv" or out.with_suffix(".csv").exists()):
        raise DataError("bench-row-out", path=out.with_suffix(".csv"))
    if row and not how.exact:  # the plan of a row is exact
        raise invalid("bench-row-exact", "--row", "--no-exact", "one of them alone")
    for setting in given.settings if row else ():
        if len(setting.split()) != 1 or setting.count("=") != 1:
            raise invalid("bench-row-setting", "--set", setting, "without --row, or NAME=VALUE")
    chosen = {
        name: value
        for name, value in {"steps": steps, "warmup": warmup}.items()
        if value is not None
    }
    on = how.on(**how.how)
    from ..study.bench import measure_train

    if row and jax.default_backend() == "cpu":
        raise DeviceError("bench-no-row", problem=fact("share-of-a-cpu"))
    loaded = given.load()
    described = {"set": given.settings, "data_note": "" if given.synthetic else _note(given)}
    progress = "none" if json_ else "auto"
    record = measure_train(
        loaded, on=on, **chosen, progress=progress, began=began, described=described
    )
    if not hosts().first:  # host 0 writes
        return
    name = re.sub(r"[^A-Za-z0-9._]+", "-", record.name)
    out = record.write(out or Path(f"bench-{name}-{record.machine.hash}.json"))
    if plan:
        record = _beside_plan(loaded, record)
        record.write(out)
    _show(record, out, json_)
    if row:
        _write_row(given, loaded, record, out)


def _write_row(given: options.Given, recipe: Recipe, record: Record, out: Path) -> None:
    """Writes the measurement as a line of `benchmarks/plan_accuracy/published.csv`, with its
    header, beside the earlier ones of that name."""
    from ..data.sources import described
    from ..planner.measured_share import accuracy_row
    from ..recipe.source import spec_of

    shape = ", ".join(described(spec_of(recipe.task.train)))
    cells = accuracy_row(given.recipe, given.settings, shape, record, out.name)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([cells, cells.values()])
    place = out.with_suffix(".csv")
    number = 1
    while place.exists():
        number += 1
        place = out.with_name(f"{out.stem}-{number}.csv")
    path = replace_file(place, text.getvalue(), "record-unwritable", option="--out")
    options.say(fact("written", path=path))


def _beside_plan(recipe: Recipe, record: Record) -> Record:
    """The record with its share of the planned speed, and what may make it slow."""
    from ..explain.plan_progress import plan_progress
    from ..machine.gpu_state import GpuState
    from ..planner.measured_share import MeasuredShare, causes, measured_share

    with plan_progress(1) as reporter:
        share = measured_share(recipe, record, progress=reporter.progress)
    planned: dict[str, Any] = {"problem": share}
    found: list[Fact] = []
    slow = True  # where no plan says it
    if isinstance(share, MeasuredShare):
        planned = share.to_json()
        slow = share.slow
        found += causes(share, record) if slow else []
    if slow:
        for number, state in record.measured["gpus"].items():
            found += GpuState(**state).findings(int(number))
    beside = plain({"planned": planned, "found": found})
    return dataclasses.replace(record, measured={**record.measured, **beside})


def _show(record: Record, out: Path, json_: bool) -> None:
    """Prints the record, as JSON or as rows."""
    if json_:
        print_json("record/1", {**record.to_json(), "written": str(out)})
        return
    measured = record.measured
    to = console()
    devices = "bench-devices-simulated" if measured["devices"]["simulated"] else "bench-devices"
    common = [
        ("recipe", " ".join([record.name, *(f"--set {text}" for text in measured["set"])])),
        (
            "data",
            ", ".join(str(text) for text in (measured["data"], measured["data_note"]) if text),
        ),
        ("devices", fact(devices, **measured["devices"])),
    ]
    to.print(
        grid(
            [
                *common,
                *_rows(record),
                ("machine", f"{record.machine.title} ({record.machine.hash})"),
            ]
        )
    )
    lines(to, "", fact("written", path=out))


def _rows(record: Record) -> list[tuple[str, Any]]:
    """The rows of a record of training: speed, what was timed, losses and memory."""
    measured = record.measured
    seconds = record.measured["seconds"]
    speed = record.figures["steps_per_second"]
    examples = record.figures["examples_per_second"]
    losses = measured["first_losses"]
    share = measured["share_of_peak"]
    exact = "bench-speed" if measured["exact"] else "bench-speed-not-exact"
    recipe = {name: measured[name] for name in ("batch", "replicas", "precision")}
    texts = [f"{value:.4g}" for value in losses]
    first = ", ".join(texts if len(texts) <= 6 else [*texts[:4], "...", texts[-1]])
    over_time = (
        f"{sparkline(speed.runs, 0.0)}  {digits(min(speed.runs))} to {digits(max(speed.runs))}"
    )
    clock = {name: measured[name] for name in ("timed_steps", "calibration_steps")}
    clock |= {name: seconds[name] for name in ("timed", "start", "compile", "warmup")}
    return [
        ("speed", fact(exact, speed=_spread(examples), unit="examples/s", **recipe)),
        ("", fact(exact, speed=_spread(speed), unit="steps/s", **recipe)),
        (
            "",
            fact(
                "bench-intervals", intervals=len(speed.runs), steps=measured["steps_per_interval"]
            ),
        ),
        ("over time", over_time),
        ("clock", fact("bench-clock", **clock, warmup_steps=len(losses))),
        ("losses", f"{first} (steps 1 to {len(losses)})"),
        ("waiting", measured["feed"]["verdict"]),
        ("memory", _memory(measured["memory_bytes_per_device"], measured["host_peak_bytes"])),
        ("share of peak", "unknown" if share is None else f"{share:.1%}"),
        *_planned(measured),
    ]


def _planned(measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The share of the planned speed, and what was found."""
    planned = measured.get("planned")
    if planned is None:
        return []
    if problem := planned.get("problem"):
        return [("of the plan", problem["text"])]
    found = [("found", one["text"]) for one in measured["found"]]
    return [("of the plan", planned["fact"]["text"]), *found]


def _spread(series: Any) -> str:
    low, high = series.quartiles
    return f"{digits(series.median)} ({digits(low)} to {digits(high)})"


def _memory(sizes: dict[str, int | None], host: int | None) -> str:
    parts = {
        name: size for name, size in sizes.items() if name not in ("peak_measured", "available")
    }
    texts = [
        f"{name} {'unknown' if size is None else byte_size(size)}" for name, size in parts.items()
    ]
    facts = [
        fact(
            "bench-memory",
            total=sum(size for size in parts.values() if size is not None),
            parts=texts,
        )
    ]
    if sizes["peak_measured"] is not None:
        code = "bench-memory-peak" if sizes["available"] is None else "bench-memory-peak-of"
        facts.append(fact(code, peak=sizes["peak_measured"], available=sizes["available"]))
    if host is not None:
        facts.append(fact("bench-memory-host", peak=host))
    return "; ".join(map(str, facts))


def _check_writable(out: Path | None) -> None:
    """Raises `DataError` before the measurement if the record cannot be written after it."""
    path = out or Path("bench.json")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise DataError(
            "bench-out", "Cannot write the record {path}: give --out FILE.json.", path=path
        )


def _note(given: options.Given) -> str:
    """A remark that belongs to every figure measured on this data set, or ""."""
    from ..data.datasets import cifar10

    return cifar10(given.data).note if given.recipe.startswith("cifar10-") else ""
