"""The report of a run as a JSON document: result, settings, where the time went, what to try.

Everything is read from the run folder. Unknown values are `None`. The report writes nothing there
and takes no lock, so it also works for a running run. The document's schema is `SCHEMA`. New fields
keep its number. The number rises when a field changes its meaning or is removed. docs/report.md
describes every field.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...base import Fact, RunError, fact, plain, say
from ...base.figures import one_line
from ...machine.fingerprint import stated
from ...recipe.described import described_rows, title
from ...run.folder.run_reader import (
    StoredRun,
    holes,
    metrics_of,
    number,
    read_ledger,
    read_run,
)
from ...study.study_file import FILE
from ..row import shown
from ..terminal import heading
from .findings import divergence, learned, slow
from .planned_speed import of_plan
from .stored_settings import command, curve, next_commands, typed
from .time_spent import Speed, TimeSpent, intervals, speed, spent

SCHEMA = "chipwise.report/6"


def report(path: str | os.PathLike, predictions: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The report of the run folder `path`, as JSON values. Runs no code of the run. Raises
    `RunError` if `path` is no run folder or cannot be read. *Arguments:* `predictions`: those of a
    `gallery`, to include."""
    folder = Path(path)
    runs = sorted(
        file.parent for name in ("recipe.json", FILE) for file in folder.glob(f"*/{name}")
    )
    if runs and not (folder / "recipe.json").exists():
        first = command("chipwise", "report", str(runs[0]))
        raise RunError(
            "folder-of-runs",
            "{folder} is not a run folder, but holds {runs:few}: type {command}.",
            folder=str(folder),
            runs=[run.name for run in runs],
            command=first,
        )
    return run_document(read_run(folder)) | {"predictions": predictions}


def run_document(run: StoredRun) -> dict[str, Any]:
    """The document of a run."""
    clock = run.clock
    total = clock.total if clock is not None else None
    timed = intervals(run)
    time = spent(run, timed)
    fast = speed(run, timed)
    rate = curve(run.recipe, clock)
    status = _status(run, total)
    # A setting to try if the rate was too high: a third of the peak
    lower = f"{rate['name']}={highest / 3:.2g}" if (highest := number(rate.get("peak"))) else None
    recipe = typed(run) or "RECIPE"
    findings = [
        *learned(run, status["state"] == "finished", lower, recipe),
        *slow(run, timed, recipe),
    ]
    metrics, steps = _metrics(run)
    devices = _devices(run)
    fingerprint = (run.result or {}).get("fingerprint")
    return {
        **heading(SCHEMA),
        "kind": "run",
        "run": one_line(run.path),
        "name": one_line(title(run.recipe) or run.path.name),
        "about": [one.json() for one in _about(run, devices or {}, total)],
        "status": status,
        "metrics": metrics,
        "metric_steps": steps,
        "best": _best(run),
        "speed": fast and vars(fast),
        "of_plan": (share := of_plan(run, fast, devices or {})) and share.json(),
        "fingerprint": one_line(fingerprint) if isinstance(fingerprint, str) else None,
        "devices": devices,
        "settings": [list(row) for row in described_rows(run.recipe, clock)],
        "schedule": rate | {"note": rate["note"].json()} if "note" in rate else rate,
        "commands": [
            one.json() | {"how": say(one, "how")}
            for one in next_commands(run, status["state"], devices or {}, lower)
        ],
        "curves": _curves(run),
        "intervals": [vars(i) for i in timed],
        "resumes": [
            {"when": one_line(s.get("time")), "step": s["step"]} for s in run.starts if s["step"]
        ],
        "seconds": plain(time),
        "advice": [finding.json() for finding in findings],
        "sources": [one.json() | {"about": say(one, "about")} for one in _sources(run, time, fast)],
        "notes": [
            one.json()
            for one in (*run.problems, *([fact("length-unknown")] if total is None else []))
        ],
    }


def _about(run: StoredRun, devices: Mapping[str, Any], total: int | None) -> Iterator[Fact]:
    """Facts: what was trained, and on what."""
    clock = run.clock
    if (many := number(devices.get("parameters"))) is not None:
        yield fact("about-parameters", parameters=many)
    if clock is not None and total is not None:
        yield fact("about-examples", examples=clock.examples)
        yield fact("about-steps", steps=total, batch=clock.batch)
    if run.recipe.get("precision"):
        yield fact("about-precision", precision=one_line(run.recipe["precision"]))
    yield from _proof(run, devices)


def _proof(run: StoredRun, devices: Mapping[str, Any]) -> Iterator[Fact]:
    """Facts: the run's ledger, the devices that agreed at its rows, and the faults that ended
    processes."""
    try:
        ledger = read_ledger(run.path)
    except RunError as error:
        yield fact("about-ledger-damaged", reason=one_line(error))
        return
    if ledger is not None and ledger.rows:
        count = int(number(devices.get("count")) or 1)
        code = "about-ledger" if count > 1 and devices.get("exact") else "about-ledger-alone"
        yield fact(code, rows=len(ledger.rows), step=max(ledger.rows), devices=count)
    yield from holes(run.path, ledger)
    verified = next(
        (v for one in reversed(run.processes) if isinstance(v := one.get("verified"), dict)), {}
    )
    if (compared := number(verified.get("replicas"))) and (step := number(verified.get("step"))):
        once = verified.get("faults")
        yield fact(
            "about-verified",
            replicas=compared,
            of=step * (number(run.recipe.get("replicas")) or 0),
            step=step,
            faults=len(once) if isinstance(once, list) else 0,
        )
    codes = ("devices-unlike", "ledger-differs", "replica-differs", "device-wrong")
    faults = [one["step"] for one in run.processes if one.get("code") in codes]
    if faults:
        yield fact("about-faults", count=len(faults), steps=faults)


def _status(run: StoredRun, total: int | None) -> dict[str, Any]:
    """The status of a run. `state` is "finished", "running", "diverged", "unfinished" or "empty".
    `steps` is the number of steps known to be done, `total` that of the whole run, `checkpoint` the
    newest. `facts` describe the state."""
    saved = run.checkpoints[-1] if run.checkpoints else None
    steps = max([row["step"] for row in run.rows], default=0)
    steps = max(steps, saved or 0)
    result = number((run.result or {}).get("steps"))
    kept = fact("checkpoint-newest", step=saved) if saved is not None else fact("checkpoint-none")
    bad = divergence(run)
    if run.running:
        host = one_line(run.starts[-1].get("host"))
        pid = run.starts[-1].get("pid")
        state = "running"
        facts = [fact("story-run-going-on", host=host, pid=pid, step=steps, total=total)]
    elif result is not None and bad is None:
        state = "finished"
        steps = int(result)
        facts = [fact("story-run-finished", steps=steps)]
        if (best := run.kept) is not None:
            facts.append(
                fact(
                    "story-run-best",
                    metric=one_line(best.metric),
                    value=best.value,
                    best=best.step,
                    better=best.better,
                )
            )
            facts = [best.story(steps, total)] if best.ended_early else facts
    elif bad is not None:
        length = fact("story-run-length", total=total)
        state = "diverged"
        facts = [fact("story-run-diverged"), bad[1], length, kept]
    elif not run.rows and saved is None:
        state = "empty"
        facts = [fact("story-run-empty")]
    else:
        begun = fact("story-run-not-finished", step=steps, total=total)
        state = "unfinished"
        facts = [begun, kept, _end(run)]
    told = [one.json() for one in facts]
    return {"state": state, "steps": steps, "total": total, "checkpoint": saved, "facts": told}


def _end(run: StoredRun) -> Fact:
    """What ended an unfinished run."""
    last = run.processes[-1] if run.processes else {}
    if last.get("event") == "start":
        return fact("story-end-unsaid", host=one_line(last.get("host")), step=last["step"])
    code = {"stopped": "story-end-stopped", "failed": "story-end-failed"}.get(str(last.get("how")))
    if code is None:
        return fact("story-run-end-unknown")
    time = one_line(last.get("time"))
    error = one_line(last.get("code"))
    return Fact(code, {"time": time, "step": last.get("step"), "error": error})


def _metrics(run: StoredRun) -> tuple[dict[str, float | None], dict[str, int]]:
    """The metrics of result.json, without steps. Without them, those of the last row of training
    and of the last evaluation, with their steps "train" and "eval". Numbers that are not finite are
    `None`."""
    stored = (run.result or {}).get("metrics")
    if isinstance(stored, dict):
        return _values(stored), {}
    metrics: dict[str, float | None] = {}
    steps: dict[str, int] = {}
    for part in ("train", "eval"):
        rows = [(row["step"], own) for row in run.rows if (own := _values(row, f"{part}/"))]
        if rows:
            steps[part], last = rows[-1]
            metrics |= last
    return metrics, steps


def _best(run: StoredRun) -> dict[str, Any] | None:
    """The evaluation that `keep_best` saved, with all its metrics. `None` if none was saved."""
    if (kept := run.kept) is None:
        return None
    there = {
        name: value for row in run.rows if row["step"] == kept.step for name, value in row.items()
    }
    about = {name: one_line(v) if isinstance(v, str) else v for name, v in vars(kept).items()}
    return about | {"metrics": _values(there, "eval/") or {one_line(kept.metric): kept.value}}


def _values(row: Mapping[str, Any], begin: str = "") -> dict[str, float | None]:
    return {
        one_line(name): number(value)
        for name, value in row.items()
        if name.startswith(begin) and (value is None or type(value) in (int, float))
    }


def _devices(run: StoredRun) -> dict[str, Any] | None:
    """The devices of the process that finished the run, or of the last one."""
    stored = _of_the_machine(run, "devices")
    if not isinstance(stored, dict):
        return None
    plain = {k: shown(v) for k, v in stored.items() if not isinstance(v, dict | list)}
    return {one_line(k): one_line(v) if isinstance(v, str) else v for k, v in plain.items()}


def _of_the_machine(run: StoredRun, name: str) -> Any:
    return (run.result or (run.starts[-1] if run.starts else {})).get(name)


def _curves(run: StoredRun) -> dict[str, list[list[float | None]]]:
    """The points of each metric: [step, epoch, seconds since the start of fit, value]."""
    curves: dict[str, list[list[float | None]]] = {}
    for row in run.rows:
        for name, value in metrics_of(row).items():
            point = [row["step"], number(row.get("epoch")), number(row.get("seconds")), value]
            curves.setdefault(one_line(name), []).append(point)
    return curves


# ---- sources


def _sources(run: StoredRun, time: TimeSpent | None, fast: Speed | None) -> Iterator[Fact]:
    """Facts: the sources of the figures."""
    yield fact("source-settings")
    if run.rows:
        yield fact("source-curves", rows=len(run.rows))
    if fast is not None:
        yield fact("source-speed", of=fast.of, intervals=fast.intervals or 0)
    if time is not None:
        yield fact("source-seconds", of=time.of, covers=str(time.covers))
    devices = _devices(run)
    title, versions = stated(_of_the_machine(run, "machine"))
    if devices is None:
        yield fact("source-machine-unknown")
    else:
        code = "source-machine-simulated" if devices.get("simulated") is True else "source-machine"
        numbers = {name: devices.get(name) for name in ("count", "kind", "platform")}
        yield Fact(code, {"machine": one_line(title or "not named"), **numbers})
    pairs = [f"{one_line(name)} {one_line(version)}" for name, version in versions.items()]
    yield fact("source-versions", versions=pairs) if pairs else fact("source-versions-unknown")
    if run.starts:
        starts = [f"{one_line(s.get('time'))} at step {s['step'] + 1:,}" for s in run.starts]
        yield fact("source-processes", processes=len(starts), starts=starts)
