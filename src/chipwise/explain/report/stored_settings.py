"""Reads the recipe that a run stores: its learning rate over the steps, and its commands.

Stored text is data. None of it is executed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...base import ChipwiseError, Fact, fact
from ...base.figures import one_line
from ...base.json_types import part
from ...machine.kernels import FILE as KERNELS
from ...recipe.direction import named
from ...recipe.duration import Clock
from ...recipe.schedules import Schedule, as_typed, from_json
from ...run.folder.run_reader import StoredRun, number
from ..row import shown

_RATES = ("lr", "learning_rate")
_POINTS = 240  # of a curve: enough for any screen


def rebuilt(value: Any) -> Schedule | None:
    """The schedule of `value`, a number or the output of `Schedule.json`. `None` for other values,
    such as a Python function, for which a run stores only the name."""
    try:
        return from_json(value)
    except (ChipwiseError, ArithmeticError, ValueError, TypeError, RecursionError):
        return None


def curve(stored: Mapping[str, Any], clock: Clock | None) -> dict[str, Any]:
    """The learning rate over the steps: `name`, `text`, `steps`, `values` and `peak`. If it is
    unknown, `note` is a fact that says why. *Arguments:* `stored`: the recipe as described by the
    run."""
    optimizer = part(stored, "optimizer")
    name = next((n for n in _RATES if n in optimizer), None)
    if name is None:
        return {"name": None, "note": fact("rate-unknown")}
    text = one_line(as_typed(optimizer[name]))
    schedule = rebuilt(optimizer[name])
    rate = {"name": name, "text": text}
    if schedule is None:
        return rate | {"note": fact("rate-is-code", name=name, value=text)}
    if clock is None or not clock.total:
        return rate | {"note": fact("length-unknown")}
    try:
        steps = np.unique(np.linspace(0, clock.total - 1, _POINTS).round().astype(np.int64))
        values = [float(schedule.table(clock, int(step), int(step) + 1)[0]) for step in steps]
        return rate | {"steps": steps.tolist(), "values": values, "peak": schedule.highest(clock)}
    except (ChipwiseError, ArithmeticError, ValueError) as error:
        return rate | {
            "note": fact("rate-not-drawn", name=name, value=text, reason=one_line(error))
        }


# ---- commands


def command(*words: str) -> str:
    """Words as a shell command, quoted if needed. Addresses are `shown`."""
    return shlex.join(one_line(shown(word)) for word in words)


def typed(run: StoredRun, setting: str | None = None) -> str | None:
    """The recipe as typed in a command, with its settings and data. `None` for a run of a Python
    program. *Arguments:* `setting`: one to add or change, such as `lr=0.1`."""
    source = run.source
    if source is None:
        return None
    given = source["set"]
    if setting is not None:
        name = setting.partition("=")[0]
        given = [*(text for text in given if text.partition("=")[0].strip() != name), setting]
    words = [source["recipe"]]
    for text in given:
        words += ["--set", text]
    if source.get("data"):
        words += ["--data", source["data"]]
    if source.get("synthetic") is True:
        words.append("--synthetic")
    return command(*words)


def next_commands(
    run: StoredRun, state: str, devices: Mapping[str, Any], lower: str | None
) -> Iterator[Fact]:
    """The next commands to type, in order. A run that diverged would diverge again, so its command
    has a `lower` rate, such as `lr=0.1`, if known."""
    path = command(str(run.path))
    usual = run.path.name not in ("", "..")  # "." has no name
    again = command(f"{run.path if usual else os.path.abspath(run.path)}-again")
    recipe = typed(run)
    kept = run.kept
    if recipe is None:
        if state == "diverged":
            tried = fact("next-try-again-in-program")
            yield tried if lower is None else fact("next-try-again-with-in-program", setting=lower)
            return
        given = {} if kept is None else {"keep_best": kept.metric, "patience": kept.patience}
        options = "".join(f", {name}={one_line(value)!r}" for name, value in given.items() if value)
        resume = [fact("next-resume-in-program", run=one_line(run.path), options=options)]
        repeat = fact("next-repeat-in-program", options=options)
        yield from resume if state in ("unfinished", "empty") else []
        yield repeat
        return
    source = run.source or {}
    pairs = {"--from": source.get("from"), "--eval-data": source.get("eval_data")}
    if kept is not None:
        pairs |= {"--keep-best": kept.metric, "--patience": kept.patience}
        if kept.better and kept.better != named(kept.metric):
            pairs[f"--{kept.better}"] = kept.metric
    more = "".join(f" {command(name, one)}" for name, one in pairs.items() if isinstance(one, str))
    more += " --with-optimizer" * (source.get("with_optimizer") is True)
    if devices.get("simulated") is True and number(devices.get("count")):
        more += f" --simulate {devices['count']:g}"
    if devices.get("portable") is True:
        more += " --portable"
    if devices.get("exact") is False:
        more += " --no-exact"
    if isinstance(devices.get("kernels"), str):
        more += f" {command('--kernels', f'{run.path}/{KERNELS}')}"
    if state == "diverged":
        lowered = f"chipwise train {typed(run, lower)}{more} --run {again}"
        yield fact(
            "next-try-again", command=f"chipwise find-lr {recipe}" if lower is None else lowered
        )
    else:
        if state in ("unfinished", "empty"):
            yield fact("next-resume", command=f"chipwise train {recipe}{more} --run {path}")
        yield fact("next-repeat", command=f"chipwise train {recipe}{more} --run {again}")
    if run.checkpoints:
        more = " --best" * (kept is not None and bool(kept.step))
        if ":" in source["recipe"]:  # a file runs only if it is named
            more += f" {command('--recipe', source['recipe'])}"
        yield fact("next-evaluate", command=f"chipwise eval {path}{more}")
