"""One run's story as a plain document: what came out, with what settings, where the time went, what to try.

Everything is read from the run folder, and every figure says what it is of; what the folder does not tell
stays `None`. Nothing is written there and no lock is taken, so a run may be reported while it goes on. The
document's schema is `SCHEMA`: a field may be added under the same number, one that changes its meaning or
goes raises it. docs/report.md describes every field.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import __version__
from ...engine.run_folder import disagreement
from ...engine.stored import metrics_of, number
from ...errors import ChipwiseError, RunError
from ...machine.fingerprint import stated
from ...recipe.check import check
from ...recipe.recipe import Recipe
from ...recipe.settings import load
from ...recipes import BUILT_IN
from ...study.document import FILE
from ...words.figures import counted
from .advice import Advice
from .commands import commands, typed
from .folder import RunFiles
from .learning import broken, learned, lower_rate, when
from .schedule import curve, settings
from .slow import slow
from .study import SCHEMA, study
from .time import clocks, intervals, speed, spent, warm_up
from .words import plain


def report(path: str | os.PathLike, recipe: str | None = None) -> dict[str, Any]:
    """The story of the run folder `path`, or of a study folder's runs (`study.study`), as JSON values.

    *Arguments:* `recipe`: a built-in name or `path.py:name`, whose file is then run. Without it a built-in
    recipe is loaded by the name that the run stores, a recipe file never.

    Raises `RunError` where `path` holds neither, or cannot be read; what loading `recipe` raises.
    """
    folder = Path(path)
    if (folder / FILE).exists():
        return study(folder)
    files = RunFiles.read(folder)
    loaded, unloaded = _load(files, recipe)
    return story(files, loaded, unloaded)


def story(files: RunFiles, loaded: Recipe | None = None, unloaded: str = "") -> dict[str, Any]:
    """The document of one run. *Arguments:* `loaded`: its recipe, if it may be had; `unloaded`: why not."""
    clock = files.clock
    total = clock.total if clock is not None else None
    found = intervals(files)
    time, fast = spent(files, found), speed(files, found)
    rate = curve(files.recipe, clock, loaded)
    status = _status(files, total)
    recipe, doubts = typed(files), _doubts(loaded)
    lower = lower_rate(rate, doubts)
    advice = [
        *learned(files, status["state"] == "finished", rate, lower, recipe),
        *slow(files, found, time, fast, recipe),
        *doubts,
    ]
    at, clock_words = clocks(files, found)
    metrics, steps = _metrics(files)
    return {
        "schema": SCHEMA,
        "chipwise": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kind": "run",
        "run": plain(files.path),
        "name": plain(files.recipe.get("name") or files.path.name),
        "about": _about(files, total),
        "status": status,
        "metrics": metrics,
        "metric_steps": steps,
        "speed": fast,
        "fingerprint": _text((files.result or {}).get("fingerprint")),
        "devices": _devices(files),
        "settings": settings(files.recipe, clock),
        "schedule": rate,
        "commands": commands(files, status["state"], _devices(files) or {}, lower),
        "curves": _curves(files, at),
        "clock": clock_words,
        "intervals": [vars(i) for i in found],
        "resumes": [vars(start) for start in files.resumes],
        "seconds": time,
        "warm_up": warm_up(found),
        "advice": [a.to_json() for a in advice],
        "unasked": unloaded,
        "sources": _sources(files, time, fast),
        "notes": _notes(files, total),
    }


def _about(files: RunFiles, total: int | None) -> list[str]:
    """What was trained, on what, in a few words each."""
    made, clock = [], files.clock
    if (many := number((_devices(files) or {}).get("parameters"))) is not None:
        made.append(f"{many:,.0f} parameters")
    if clock is not None and total is not None:
        made.append(f"{clock.examples:,} training examples")
        made.append(f"{counted(total, 'step')} of {clock.batch:,} examples")
    if files.recipe.get("precision"):
        made.append(plain(files.recipe["precision"]))
    return made


def _status(files: RunFiles, total: int | None) -> dict[str, Any]:
    """`state` is "finished", "running", "diverged", "unfinished" or "empty"; `steps` those that are known to
    be done."""
    last = max((row["step"] for row in files.rows), default=0)
    saved = files.checkpoints[-1] if files.checkpoints else None
    of = f" of {total:,}" if total is not None else ""
    steps = max(last, saved or 0)
    result = number((files.result or {}).get("steps"))
    kept = f"its newest checkpoint is of step {saved:,}" if saved is not None else "it has no checkpoint"
    bad = broken(files)
    if files.holder is not None:
        state, words = "running", f"Running now ({files.holder}): step {steps:,}{of} so far."
    elif files.result is not None and result is not None and not bad:
        state, steps = "finished", int(result)
        words = f"Finished: {counted(steps, 'step')}."
    elif bad is not None:
        state, words = "diverged", f"Diverged: {when(files, bad)}{of}; {kept}."
    elif not files.rows and saved is None:
        state, words = "empty", "No step was logged or saved: there is nothing to tell but the settings."
    else:
        state = "unfinished"
        words = f"Not finished: step {steps:,}{of}; {kept}. The folder does not say what ended it."
    return {"state": state, "steps": steps, "total": total, "checkpoint": saved, "sentence": words}


def _metrics(files: RunFiles) -> tuple[dict[str, float | None], dict[str, int]]:
    """The metrics of result.json; else those of the last row of training and of the last evaluation, with
    their steps, "train" and "eval". A number that is not finite is `None`."""
    stored = (files.result or {}).get("metrics")
    if isinstance(stored, dict):
        return _values(stored), {}
    found: dict[str, float | None] = {}
    steps: dict[str, int] = {}
    for part in ("train", "eval"):
        rows = [(row["step"], own) for row in files.rows if (own := _values(row, f"{part}/"))]
        if rows:
            steps[part], last = rows[-1]
            found |= last
    return found, steps


def _values(told: Mapping[str, Any], begin: str = "") -> dict[str, float | None]:
    return {
        plain(name): number(value)
        for name, value in told.items()
        if name.startswith(begin) and (value is None or type(value) in (int, float))
    }


def _devices(files: RunFiles) -> dict[str, Any] | None:
    stored = (files.result or {}).get("devices")
    if not isinstance(stored, dict):
        return None
    return {
        plain(k): plain(v) if isinstance(v, str) else v
        for k, v in stored.items()
        if not isinstance(v, dict | list)
    }


def _curves(files: RunFiles, at: Sequence[float | None]) -> dict[str, list[list[float | None]]]:
    """For each metric its points: [step, epoch, seconds, value]."""
    made: dict[str, list[list[float | None]]] = {}
    for row, seconds in zip(files.rows, at, strict=True):
        for name, value in metrics_of(row).items():
            clock = None if seconds is None else round(seconds, 4)
            made.setdefault(plain(name), []).append([row["step"], number(row.get("epoch")), clock, value])
    return made


def _load(files: RunFiles, recipe: str | None) -> tuple[Recipe | None, str]:
    """The run's recipe where it may be loaded, or why it was not."""
    source = files.source
    if recipe is None:
        if source is None:
            return None, "its recipe is not known by name; give --recipe path.py:name to look at it too"
        if source["recipe"] not in BUILT_IN:
            spec = plain(source["recipe"])
            return (
                None,
                f"its recipe is code ({spec}), which a report does not run unless told to: --recipe {spec}",
            )
        if "://" in (source.get("data") or ""):
            return None, "its data are on another machine, which a report does not ask"
    spec = recipe if recipe is not None else source["recipe"]  # type: ignore[index]
    given, data = (source["set"], source.get("data")) if source is not None else ((), None)
    try:
        loaded = load(spec, given, data, bool(source and source.get("synthetic") is True))
        changed = disagreement(dict(files.recipe), loaded.describe())
    except ChipwiseError as error:
        if recipe is not None:
            raise
        return None, plain(f"its recipe could not be loaded: {error}")
    if changed:
        if recipe is not None:
            raise RunError(f"--recipe {recipe} is not the recipe of {files.path} ({plain(changed)}).")
        return None, plain(f"{spec} is no longer the recipe of this run ({changed})")
    return loaded, ""


def _doubts(loaded: Recipe | None) -> list[Advice]:
    """What `chipwise check` says of the recipe."""
    if loaded is None:
        return []
    return [
        Advice("settings", f"{f.given}.", f"Usual: {f.usual}, because {f.why}.", (f.type,))
        for f in check(loaded)
    ]


def _sources(files: RunFiles, time: dict[str, Any] | None, fast: dict[str, Any] | None) -> list[list[str]]:
    """Where each figure comes from: (what, how it was had)."""
    made = [["settings", "recipe.json, written before the first step"]]
    if files.rows:
        made.append(
            [
                "curves",
                f"metrics.jsonl, {counted(len(files.rows), 'row')}. A training metric is the mean over the "
                "steps since the row before, while the parameters moved; an evaluation's is over every "
                "held-out example once",
            ]
        )
    if fast is not None:
        made.append(
            [
                "speed",
                f"{fast['of']}: median and quartiles of "
                f"{counted(int(number(fast['intervals']) or 0), 'log interval')}. Its clock covers training, "
                "waiting for data included, and neither warm-up, evaluation nor checkpoints",
            ]
        )
    if time is not None:
        made.append(["seconds", f"{time['of']}: {time['covers']}"])
    devices = _devices(files)
    title, versions = stated((files.result or {}).get("machine"))
    if devices is not None:
        simulated = " (simulated)" if devices.get("simulated") is True else ""
        found = f"{devices.get('count')} × {devices.get('kind')}{simulated}, {devices.get('platform')}"
        made.append(["machine", f"{plain(title)}; {found}" if title is not None else found])
    else:
        made.append(["machine", "not known: a run notes it when it is complete"])
    said = ", ".join(f"{plain(name)} {plain(version)}" for name, version in versions.items())
    made.append(["versions", said or "not known: a run notes them when it is complete"])
    if files.starts:
        when = ", ".join(f"{s.when} at step {s.step + 1:,}" for s in files.starts)
        made.append(["processes", f"{len(files.starts)}, by their event files, first rows written: {when}"])
    return made


def _notes(files: RunFiles, total: int | None) -> list[str]:
    """What in the folder was not as expected."""
    made = list(files.problems)
    if files.damaged:
        lines = ", ".join(str(n) for n in files.damaged[:5]) + (", ..." if len(files.damaged) > 5 else "")
        made.append(
            f"metrics.jsonl: {counted(len(files.damaged), 'line')} cannot be read and "
            f"{'is' if len(files.damaged) == 1 else 'are'} left out (line {lines})."
        )
    if total is None:
        made.append(
            "recipe.json does not tell the run's length: batch, duration or training examples are missing."
        )
    return made


def _text(value: Any) -> str | None:
    return plain(value) if isinstance(value, str) else None
