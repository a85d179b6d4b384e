"""The time of a run: the intervals between log rows, and the seconds of each kind of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base import Fact, fact
from ...base.json_types import part
from ...run.folder.run_reader import StoredRun, number
from ..row import whole

PARTS = {
    "start": "starting",
    "compile": "compiling",
    "train": "training",
    "wait_data": "waiting for data",
    "evaluate": "evaluating",
    "checkpoint": "saving checkpoints",
    "own_code": "code between moments",
    "rest": "all but training",
    "other": "other",
}
"""The kinds of work that took time, in drawing order, with their labels."""


@dataclass(frozen=True)
class Interval:
    """The steps `first` to `last` between two log rows."""

    first: int
    last: int
    seconds: float
    """Training time, without evaluation and checkpoints."""
    speed: float
    """Global speed in examples/s."""
    waited: float | None
    """The share of the seconds in which the device waited for data."""
    warmup: bool
    """Whether it is the first interval of a process."""


@dataclass(frozen=True)
class Speed:
    """Median and quartiles in examples/s (global)."""

    examples_per_second: float
    quartiles: list[float] | None
    intervals: int | None
    share_of_peak: float | None
    of: str
    """The source: result.json or metrics.jsonl."""
    batch: int | None
    """The global batch."""
    replicas: int | None


@dataclass(frozen=True)
class TimeSpent:
    """Seconds by part, which add up to `total`."""

    parts: dict[str, float]
    total: float
    covers: Fact
    """The part of the run that the seconds cover."""
    of: str
    """The source: result.json or metrics.jsonl."""
    processes: int
    """The number of processes that trained the run."""
    all_seconds: float | None
    """The wall time of all processes, if the rows have it."""


def intervals(run: StoredRun) -> list[Interval]:
    """An interval for each row that has a speed."""
    begins = sorted({0, *(start["step"] for start in run.starts)})
    timed: list[Interval] = []
    logged = 0
    began = -1
    for row in run.rows:
        rate = number(row.get("steps_per_second")) or 0.0
        examples = number(row.get("examples_per_second")) or 0.0
        if min(rate, examples) <= 0 or row["step"] <= logged:
            continue
        step = row["step"]
        begin = max(b for b in begins if b < step)
        fresh = begin != began
        began = begin
        logged = max(logged, begin)
        waited = number(row.get("wait_data_share"))
        timed.append(Interval(logged + 1, step, (step - logged) / rate, examples, waited, fresh))
        logged = step
    return timed


def speed(run: StoredRun, timed: Sequence[Interval]) -> Speed | None:
    """The speed from result.json, otherwise from the rows. Leaves out the warm-up if other
    intervals exist. Returns `None` if nothing was timed."""
    beside = {name: whole(run.recipe, name) for name in ("batch", "replicas")}
    stored = part(run.result, "speed")
    if (median := number(stored.get("examples_per_second")) or 0.0) > 0:
        quartiles = stored.get("examples_per_second_quartiles")
        sound = (
            isinstance(quartiles, list)
            and len(quartiles) == 2
            and None not in map(number, quartiles)
        )
        many = number(stored.get("intervals"))
        share = number(stored.get("share_of_peak"))
        known = None if many is None else int(many)
        return Speed(median, quartiles if sound else None, known, share, "result.json", **beside)
    steady = [i.speed for i in timed if not i.warmup] or [i.speed for i in timed]
    if not steady:
        return None
    low, median, high = (float(q) for q in np.percentile(steady, [25, 50, 75]))
    return Speed(median, [low, high], len(steady), None, "metrics.jsonl", **beside)


def spent(run: StoredRun, timed: Sequence[Interval]) -> TimeSpent | None:
    """The seconds from result.json, otherwise from the rows. `None` if nothing was timed."""
    stored = part(run.result, "seconds")
    everything = max(
        (s for row in run.rows if (s := number(row.get("seconds"))) is not None), default=None
    )
    if number(stored.get("total")):
        (parts, total), of = _complete(stored), "result.json"
        last = run.starts[-1]["step"] if run.starts else 0
        covers = fact("covers-finishing-process", step=last + 1) if last else fact("covers-run")
    elif everything is not None:
        train = sum(i.seconds for i in timed)
        waited = sum(i.seconds * (i.waited or 0.0) for i in timed)
        wait = min(max(waited, 0.0), train)
        parts = {"train": train - wait, "wait_data": wait, "rest": max(everything - train, 0.0)}
        total = max(everything, train)
        of = "metrics.jsonl"
        covers = fact("covers-rows")
    else:
        return None
    if total <= 0:
        return None
    parts = {name: round(value, 4) for name, value in parts.items() if value > 0}
    return TimeSpent(parts, round(total, 4), covers, of, max(len(run.starts), 1), everything)


def _complete(stored: Mapping[str, Any]) -> tuple[dict[str, float], float]:
    """The seconds of result.json, with waiting subtracted from training, and the remainder as
    `other`."""
    known = {name: max(number(stored.get(name)) or 0.0, 0.0) for name in PARTS}
    total = number(stored.get("total")) or 0.0
    sections = sum(
        known[n] for n in ("start", "compile", "train", "evaluate", "checkpoint", "own_code")
    )
    wait = min(known["wait_data"], known["train"])
    parts = known | {
        "train": known["train"] - wait,
        "wait_data": wait,
        "other": max(total - sections, 0.0),
    }
    return parts, max(total, sections)
