"""Where a run's time went: the intervals between log rows, and the seconds of each kind of work."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...engine.stored import number
from .folder import RunFiles
from .words import seconds

PARTS = {
    "start": "starting",
    "compile": "compiling",
    "train": "training",
    "wait_data": "waiting for data",
    "evaluate": "evaluating",
    "checkpoint": "saving checkpoints",
    "rest": "all but training",
    "other": "other",
}
"""What time went to, in the order it is drawn, and in words."""


@dataclass(frozen=True)
class Interval:
    """The steps `first` to `last` between two log rows. `seconds` are of training: neither evaluation nor
    checkpoints; `speed` is global, in examples/s; `waited` is the share of the seconds in which the device
    waited for data. `warmup`: the first of a process."""

    first: int
    last: int
    seconds: float
    speed: float
    waited: float | None
    warmup: bool


def intervals(files: RunFiles) -> list[Interval]:
    """One for each row that has a speed."""
    begins = sorted({0, *(start.step for start in files.starts)})
    made: list[Interval] = []
    logged, began = 0, -1
    for row in files.rows:
        rate, examples = number(row.get("steps_per_second")), number(row.get("examples_per_second"))
        if rate is None or rate <= 0 or examples is None or row["step"] <= logged:
            continue
        step = row["step"]
        begin = max(b for b in begins if b < step)
        fresh, began = begin != began, begin
        logged = max(logged, begin)
        waited = number(row.get("wait_data_share"))
        made.append(Interval(logged + 1, step, (step - logged) / rate, examples, waited, fresh))
        logged = step
    return made


def speed(files: RunFiles, found: Sequence[Interval]) -> dict[str, Any] | None:
    """Median and quartiles in examples/s (global), of result.json or else of the rows, warm-up left out
    where there is more. `None` when nothing was timed."""
    batch, replicas = files.recipe.get("batch"), files.recipe.get("replicas")
    beside = {"batch": batch, "replicas": replicas}
    stored = (files.result or {}).get("speed")
    if isinstance(stored, dict) and (number(stored.get("examples_per_second")) or 0.0) > 0:
        quartiles = stored.get("examples_per_second_quartiles")
        sound = isinstance(quartiles, list) and [number(q) for q in quartiles]
        return {
            "examples_per_second": stored["examples_per_second"],
            "quartiles": sound if sound and len(sound) == 2 and None not in sound else None,
            "intervals": stored.get("intervals"),
            "share_of_peak": number(stored.get("share_of_peak")),
            "of": "result.json",
            **beside,
        }
    steady = [i.speed for i in found if not i.warmup] or [i.speed for i in found]
    if not steady:
        return None
    low, median, high = (float(q) for q in np.percentile(steady, [25, 50, 75]))
    return {
        "examples_per_second": median,
        "quartiles": [low, high],
        "intervals": len(steady),
        "share_of_peak": None,
        "of": "metrics.jsonl",
        **beside,
    }


def spent(files: RunFiles, found: Sequence[Interval]) -> dict[str, Any] | None:
    """Seconds by part, which add up to `total`, and `covers`: what of. `None` when nothing was timed.

    `processes` is how many trained the run, `all_seconds` the wall time of all of them where rows have it.
    """
    stored = (files.result or {}).get("seconds")
    told = [number(row.get("seconds")) for row in files.rows]
    wall = [t for t in told if t is not None]
    everything = max(wall) if wall and len(wall) == len(told) else None
    processes = max(len(files.starts), 1)
    if isinstance(stored, dict) and number(stored.get("total")):
        parts, total = _complete(stored)
        last = files.resumes[-1].step if files.resumes else 0
        # a process that was stopped before its first row is in no list of them, and in the rows' clock
        resumed = last > 0 or (everything is not None and everything > 1.5 * total)
        who = f"the process that finished it (from step {last + 1:,})" if last else "the last process"
        covers = f"the wall time of {who if resumed else 'the run'}, from the start of fit to its result"
    elif everything is not None:
        total = everything
        train, wait = _by_rows(found)
        parts = {"train": train - wait, "wait_data": wait, "rest": max(total - train, 0.0)}
        covers = "the wall time from the start of fit to the last row, of all its processes"
    elif found:
        train, wait = _by_rows(found)
        total, parts = train, {"train": train - wait, "wait_data": wait}
        covers = "training alone: these rows have no wall clock, and the run no result"
    else:
        return None
    return {
        "parts": {name: round(value, 4) for name, value in parts.items() if value > 0},
        "total": round(total, 4),
        "covers": covers,
        "of": "result.json" if isinstance(stored, dict) and number(stored.get("total")) else "metrics.jsonl",
        "processes": processes,
        "all_seconds": everything,
    }


def _complete(stored: Mapping[str, Any]) -> tuple[dict[str, float], float]:
    """result.json's seconds, with waiting taken out of training, and what is in no section as `other`."""
    known = {name: max(number(stored.get(name)) or 0.0, 0.0) for name in PARTS}
    total = number(stored.get("total")) or 0.0
    sections = sum(known[n] for n in ("start", "compile", "train", "evaluate", "checkpoint"))
    wait = min(known["wait_data"], known["train"])
    parts = known | {"train": known["train"] - wait, "wait_data": wait, "other": max(total - sections, 0.0)}
    return parts, max(total, sections)


def _by_rows(found: Sequence[Interval]) -> tuple[float, float]:
    return sum(i.seconds for i in found), sum(i.seconds * (i.waited or 0.0) for i in found)


def warm_up(found: Sequence[Interval]) -> dict[str, Any] | None:
    """The run's first interval beside the others; `None` when it is the only one."""
    steady = [i.speed for i in found if not i.warmup]
    if not found or not steady:
        return None
    first, median = found[0], statistics.median(steady)
    return {
        "first": first.first,
        "last": first.last,
        "seconds": first.seconds,
        "examples_per_second": first.speed,
        "sentence": f"The first interval (steps {first.first:,} to {first.last:,}, {seconds(first.seconds)}) "
        f"ran at {first.speed:,.0f} examples/s and the median of the others at {median:,.0f}; it is warm-up, "
        f"and no speed here counts it.",
    }


def clocks(files: RunFiles, found: Sequence[Interval]) -> tuple[list[float | None], str]:
    """For each row the seconds at which it was written, and what these are: wall time where every row has it,
    else training alone, worked out from the speeds."""
    told = [number(row.get("seconds")) for row in files.rows]
    if told and all(t is not None for t in told):
        return told, "wall time, start and compilation included"
    at, total = [0], 0.0
    sums = [0.0]
    for i in found:
        total += i.seconds
        at.append(i.last)
        sums.append(total)
    if len(at) == 1:
        return [None] * len(files.rows), "not known"
    worked = np.interp([row["step"] for row in files.rows], at, sums)
    return [float(t) for t in worked], "training alone: these rows have no wall clock"
