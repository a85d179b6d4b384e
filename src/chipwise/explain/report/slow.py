"""What was slow in a run, and what to try: rules, each with the figures that it rests on.

A rule speaks when its figure passes a threshold, which stands beside it; where no rule speaks nothing stood
out. What a rule advises is a command or a setting to try, not a promise.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ...data.stages import NAMES
from ...data.watch import FED
from ...engine.stored import number
from ...words.figures import counted, listed
from .advice import Advice
from .folder import RunFiles
from .time import Interval
from .words import plain, seconds, share

SHORT = 60.0  # seconds of a run below which shares of its wall time say little
LARGE = 0.10  # share of the wall time from which work beside training is worth a change
SMALL = 0.05  # and the share to bring it to
UNEVEN = 0.25  # distance of the quartiles of the speed, over its median
SLOW = 0.5  # of the median speed: below it an interval is slow
ENOUGH = 6  # intervals, from which a spread can be told
NOTABLE = 0.01  # share of the training time that slow intervals must have cost
LOW_PEAK = 0.2  # share of the chip's peak


def slow(
    files: RunFiles,
    found: Sequence[Interval],
    spent: Mapping[str, Any] | None,
    speed: Mapping[str, Any] | None,
    recipe: str | None,
) -> list[Advice]:
    """About time, the largest cost first. *Arguments:* `recipe`: as it is typed after a command, with its
    settings; `None` for a run of a Python program."""
    typed = recipe or "RECIPE"
    made = _input(files, found, typed)
    made += _sections(files, spent)
    made += _spread(found, speed, typed)
    made += _intervals(found)
    return made + _peak(files, speed, typed)


def _input(files: RunFiles, found: Sequence[Interval], typed: str) -> list[Advice]:
    feed = (files.result or {}).get("feed")
    measure = f"chipwise bench-feed {typed}"
    if isinstance(feed, dict) and isinstance(feed.get("code"), str):
        if feed["code"] != "input-bound":
            return []
        advised = plain(feed["advice"]["text"])
        return [Advice("time", "The device waited for data.", plain(feed["verdict"]), (advised, measure))]
    train = sum(i.seconds for i in found)
    waited = sum(i.seconds * (i.waited or 0.0) for i in found)
    if not train or waited / train < FED:
        return []
    busy: dict[str, float] = {}
    for row in files.rows:
        for stage in NAMES:
            busy[stage] = busy.get(stage, 0.0) + (number(row.get(f"feed/{stage}_cores")) or 0.0)
    worst = max(busy, key=lambda stage: busy[stage]) if any(busy.values()) else None
    evidence = f"{seconds(waited)} of {seconds(train)} of training ({share(waited / train)}) went by waiting"
    evidence += f"; of the feed's stages '{worst}' kept the most cores busy." if worst else "."
    return [Advice("time", "The device waited for data.", evidence, (measure,))]


def _sections(files: RunFiles, spent: Mapping[str, Any] | None) -> list[Advice]:
    """Work beside training that took a large share of the wall time. Only result.json tells it apart."""
    if spent is None or spent["of"] != "result.json":
        return []
    total, parts = spent["total"], spent["parts"]
    first = parts.get("start", 0.0) + parts.get("compile", 0.0)
    if total < SHORT:
        if first < total / 2:
            return []
        evidence = (
            f"{seconds(first)} of {seconds(total)} ({share(first / total)}) went to starting and compiling, "
            f"which a longer run pays once as well."
        )
        what = "The run is short: its wall time says little about its speed."
        return [Advice("time", what, evidence, ("compare runs by examples/s",))]
    made = []
    feed = (files.result or {}).get("feed")
    resident = isinstance(feed, dict) and feed.get("data") == "on the device"
    for name, what, attempt in (
        # All of the data is read before the first step where it is to live on the device
        ("start", "Starting took a large share.", ("--feed host",) if resident else ()),
        ("compile", "Compiling took a large share.", ("export JAX_COMPILATION_CACHE_DIR=~/.cache/jax",)),
        ("evaluate", "Evaluating took a large share.", _rarer(files, parts, total)),
        (
            "checkpoint",
            "Saving checkpoints took a large share.",
            ("--checkpoint-every 25%", "--run on a faster disk"),
        ),
    ):
        part = parts.get(name, 0.0)
        if part / total >= LARGE:
            evidence = f"{seconds(part)} of {seconds(total)}, {share(part / total)} of the wall time"
            if name == "start":
                evidence += "; a longer run pays it once as well"
            if name == "evaluate":
                evidence += f", for {counted(len(_evaluations(files)), 'evaluation')}"
            made.append(Advice("time", what, f"{evidence}.", attempt))
    return made


def _evaluations(files: RunFiles) -> list[Mapping[str, Any]]:
    return [row for row in files.rows if any(name.startswith("eval/") for name in row)]


def _rarer(files: RunFiles, parts: Mapping[str, float], total: float) -> tuple[str, ...]:
    epochs = [e for row in _evaluations(files) if (e := number(row.get("epoch"))) is not None]
    if len(epochs) < 2:
        return ("--eval-every end",)
    every = statistics.median(b - a for a, b in itertools.pairwise(epochs))
    factor = math.ceil(parts.get("evaluate", 0.0) / total / SMALL)
    return (f"--eval-every {max(every * factor, 0.001):.3g}ep",) if every > 0 else ("--eval-every end",)


def _spread(found: Sequence[Interval], speed: Mapping[str, Any] | None, typed: str) -> list[Advice]:
    if speed is None or not speed["quartiles"] or (number(speed["intervals"]) or 0) < ENOUGH:
        return []
    (low, high), median = speed["quartiles"], speed["examples_per_second"]
    if (high - low) / median < UNEVEN:
        return []
    evidence = (
        f"The middle half of {speed['intervals']} intervals ran at {low:,.0f} to {high:,.0f} examples/s, "
        f"{share((high - low) / median)} of the median {median:,.0f} apart: a difference of less between two "
        f"runs says nothing."
    )
    attempt = ("look for other work on the machine", f"chipwise bench {typed}")
    return [Advice("time", "The speed varied.", evidence, attempt)]


def _intervals(found: Sequence[Interval]) -> list[Advice]:
    steady = [i for i in found if not i.warmup]
    if len(steady) < ENOUGH:
        return []
    median = statistics.median(i.speed for i in steady)
    slow = [i for i in steady if i.speed < SLOW * median]
    lost = sum(i.seconds * (1 - i.speed / median) for i in slow)
    total = sum(i.seconds for i in found)
    if not slow or lost < NOTABLE * total:
        return []
    worst = sorted(slow, key=lambda i: i.speed)[:5]
    steps = listed([f"{i.first:,}-{i.last:,} ({i.speed:,.0f})" for i in sorted(worst, key=lambda i: i.first)])
    more = f" and {len(slow) - len(worst)} more" if len(slow) > len(worst) else ""
    waited = sum(i.seconds * (i.waited or 0.0) for i in slow)
    cause = (
        f"{seconds(waited)} of it waiting for data."
        if waited >= lost / 2
        else "Little of it was waiting for data: the device or the host was busy with something else."
        if any(i.waited is not None for i in slow)
        else "The rows do not say whether they waited for data."
    )
    evidence = (
        f"Below half the median of {median:,.0f} examples/s: steps {steps}{more}. They cost {seconds(lost)} "
        f"of {seconds(total)} of training. {cause}"
    )
    return [
        Advice(
            "time",
            f"{counted(len(slow), 'interval')} slow.",
            evidence,
            ("look for what else the machine did then",),
        )
    ]


def _peak(files: RunFiles, speed: Mapping[str, Any] | None, typed: str) -> list[Advice]:
    reached = speed and speed["share_of_peak"]
    if not reached or reached >= LOW_PEAK:
        return []
    precision = files.recipe.get("precision")
    attempt = [f"chipwise find-batch {typed}", f"chipwise bench {typed} --profile"]
    if precision == "f32":
        attempt.insert(0, "--set precision=bf16")
    evidence = f"The products of a step used {share(reached)} of the chip's dense peak in {plain(precision)}."
    return [Advice("time", "The chip was little used.", evidence, tuple(attempt))]
