"""The data rate that a step needs, and whether the host can deliver it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..data.sources import empty, fill, spec_of
from ..engine.state import nbytes
from ..errors import DataError
from ..machine import record as records
from ..machine.limits import usable_cores
from ..recipe.recipe import Recipe
from ..recipe.source import Source
from ..words.facts import Fact, fact
from .plans import Feeding

_MEASURE_SECONDS = 0.5


@dataclass(frozen=True)
class HostSpeed:
    """Examples a second that one of a host's `cores` reads and decodes; `source`: where that figure comes
    from."""

    examples_per_second_per_core: float
    cores: int
    source: Fact


def measured(source: Source) -> HostSpeed:
    """The speed of one core of this host, measured for half a second.

    Examples are spread over the source, so that cached ones at its beginning do not bias the result.
    """
    n, done, chunk = len(source), 0, 16
    order = np.random.default_rng(0).integers(0, min(n, 1 << 31), 1 << 14).astype(np.int32)
    out = empty(spec_of(source), chunk)
    start = time.perf_counter()
    while True:
        rows = np.take(order, np.arange(done, done + chunk), mode="wrap")
        fill(source, rows, out)
        done += chunk
        elapsed = time.perf_counter() - start
        if elapsed >= _MEASURE_SECONDS:
            return HostSpeed(done / elapsed, usable_cores(), fact("feed-measured-here"))


def recorded(path: str | os.PathLike, source: Source) -> HostSpeed:
    """The speed of one core, from a record of `chipwise bench-feed` with all workers.

    Raises `DataError` if the file is not such a record, or its examples have another size than those of
    `source`.
    """
    record = records.read(path, kind="feed")
    expected, recorded_bytes = nbytes(spec_of(source)), record.measured.get("bytes_per_example")
    if recorded_bytes != expected:
        raise DataError("feed-record-of-other-examples", path=str(path), found=recorded_bytes, bytes=expected)
    prefix = "examples_per_second."
    rates = {
        int(name.removeprefix(prefix)): series.median
        for name, series in record.figures.items()
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    }
    if not rates or min(rates) < 1 or min(rates.values()) <= 0:
        raise DataError("feed-record-without-figure", path=str(path), figure=f"{prefix}N")
    workers = max(rates)
    origin = fact("feed-recorded", file=Path(path).name, machine=record.machine.title, workers=workers)
    return HostSpeed(rates[workers] / workers, max(1, int(record.machine.cores)), origin)


def feeding(
    recipe: Recipe, examples_per_second: float, *, resident: bool, host: HostSpeed | None, cores: int | None
) -> Feeding:
    """Compares the demand of `examples_per_second` (global) with what a host delivers.

    *Arguments:* `host`: its speed, or `None` if there is no data to measure it; `cores`: the target host's,
    by default those of `host`, or this host's.
    """
    size = nbytes(spec_of(recipe.task.train))
    per_core = None if host is None else host.examples_per_second_per_core
    source = host.source if host is not None else fact("feed-not-measured")
    return Feeding(
        resident=resident,
        bytes_per_example=size,
        wanted_examples_per_second=examples_per_second,
        wanted_bytes_per_second=examples_per_second * size,
        examples_per_second_per_core=per_core,
        cores_needed=None if per_core is None or resident else examples_per_second / per_core,
        cores=cores or (host.cores if host is not None else usable_cores()),
        measured_on=fact("feed-resident") if resident else source,
    )
