"""What a run folder holds, read and nothing more: no lock is taken, nothing is written, no code is run.

A folder may come from anywhere, and from a process that was killed: every part may be missing or damaged.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..atomic import read_regular
from ..errors import RecipeError, RunError
from ..recipe.duration import Clock
from ..recipe.recipe import difference
from ..words.facts import Fact, fact

FROM_WEIGHTS = " from weights "
"""In the name of a task's `init` that begins with weights of a file or a run; their digest follows."""

_DIGITS = 15  # of a step or a number of examples; a file that says more is damaged


@dataclass(frozen=True)
class StoredRun:
    """A run folder.

    *Fields:* `recipe`, as run; `rows` of metrics by step; `result`, `None` before the run is complete;
    `processes`, the events of processes.jsonl in their order; `problems`, what is damaged.
    """

    path: Path
    recipe: dict[str, Any]
    rows: list[dict[str, Any]]
    result: dict[str, Any] | None
    processes: list[dict[str, Any]]
    problems: list[Fact]

    @property
    def starts(self) -> list[dict[str, Any]]:
        """When processes started: the first, and those that resumed."""
        return [event for event in self.processes if event["event"] == "start"]

    @property
    def checkpoints(self) -> list[int]:
        """The steps of its checkpoints, in order."""
        return _checkpoints(self.path)

    @property
    def clock(self) -> Clock | None:
        """The run's clock, from the recipe as stored; `None` when that lacks what it takes."""
        task = self.recipe.get("task")
        train = task.get("train") if isinstance(task, dict) else None
        examples = train.get("examples") if isinstance(train, dict) else None
        batch, duration = self.recipe.get("batch"), self.recipe.get("duration")
        if type(examples) is not int or type(batch) is not int or not isinstance(duration, str):
            return None
        try:
            clock = Clock.for_run(examples, batch, duration)
        except RecipeError:
            return None
        return clock if max(examples, clock.total or 0) < 10**_DIGITS else None

    @property
    def source(self) -> dict[str, Any] | None:
        """How the command line made the recipe; `None` for a run of a Python program."""
        source = self.recipe.get("source")
        if not isinstance(source, dict) or not isinstance(source.get("recipe"), str):
            return None
        settings = source.get("set")
        sound = isinstance(settings, list) and all(isinstance(text, str) for text in settings)
        return source if sound and isinstance(source.get("data"), str | None) else None

    @property
    def running(self) -> bool:
        """Whether a process of this host is training here now, by its number and when it started."""
        if not self.processes or self.processes[-1]["event"] != "start":
            return False
        last = self.processes[-1]
        if last.get("host") != socket.gethostname() or number(last.get("started")) is None:
            return False
        try:
            return abs(psutil.Process(last["pid"]).create_time() - last["started"]) < 1
        except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
            return False


def read_run(path: str | Path) -> StoredRun:
    """The run folder `path`. Raises `RunError` when it holds no run, or one that cannot be read."""
    path = Path(path)
    recipe, (rows, damaged), (result, wrong) = stored_recipe(path), read_rows(path), read_result(path)
    problems = []
    if damaged:
        problems.append(fact("metrics-damaged", lines=damaged, count=len(damaged)))
    if wrong:
        problems.append(fact("result-damaged", reason=wrong))
    return StoredRun(path, recipe, rows, result, read_processes(path), problems)


def read_processes(path: Path) -> list[dict[str, Any]]:
    """The events of processes.jsonl; damaged lines are left out, a missing file has none."""
    try:
        lines = read_regular(path / "processes.jsonl").decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        event = parsed_row(line)
        if event is not None and event.get("event") in ("start", "end"):
            events.append(event)
    return events


def stored_recipe(run: Path) -> dict[str, Any]:
    """What `recipe.json` of the run folder `run` says.

    Raises `RunError` when there is none, or when it is damaged.
    """
    file = run / "recipe.json"
    try:
        stored = json.loads(read_regular(file))
        if not isinstance(stored, dict):
            raise ValueError(f"it holds a {type(stored).__name__}")
    except (FileNotFoundError, NotADirectoryError):
        raise RunError("not-a-run", path=str(run)) from None
    except OSError as error:
        raise RunError("file-unreadable", path=str(file), reason=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise RunError("recipe-json-damaged", path=str(file), run=str(run), reason=str(error)) from error
    return stored


def disagreement(
    stored: dict[str, Any], given: dict[str, Any], *, beginning: bool = True
) -> list[tuple[str, Any, Any]]:
    """What two descriptions of a recipe differ in: (setting, stored, given). Where a recipe came from
    (`source`) does not count, nor, without `beginning`, the weights that training began with."""
    a, b = ({k: v for k, v in d.items() if k != "source"} for d in (stored, json.loads(json.dumps(given))))
    if not beginning:
        a, b = _of_any_weights(a), _of_any_weights(b)
    return difference(a, b)


def _of_any_weights(described: dict[str, Any]) -> dict[str, Any]:
    task = described.get("task")
    if not isinstance(task, dict) or not isinstance(task.get("init"), str):
        return described
    return {**described, "task": {**task, "init": task["init"].partition(FROM_WEIGHTS)[0]}}


def newest_checkpoint(run: Path) -> int | None:
    """The step of the newest checkpoint of a run; `None` without one."""
    return max(_checkpoints(run), default=None)


def _checkpoints(run: Path) -> list[int]:
    try:
        names = os.listdir(run / "checkpoints")
    except OSError:
        return []
    # A checkpoint gets its final name, the step, only when it is complete.
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < _DIGITS)


def read_rows(run: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows of metrics.jsonl by step, and the numbers of the lines that are damaged.

    The last line of a killed process has no end and is none of these. Raises `RunError` for a file that
    cannot be read; a missing one has no rows.
    """
    file = run / "metrics.jsonl"
    try:
        text = read_regular(file, 1 << 30).decode("utf-8", "replace")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise RunError("file-unreadable", path=str(file), reason=error.strerror or str(error)) from error
    found, damaged = [], []
    *lines, rest = text.split("\n")
    for at, line in enumerate([*lines, rest], 1):
        row = parsed_row(line)
        if row is not None:
            found.append(row)
        elif line.strip() and at <= len(lines):
            damaged.append(at)
    found.sort(key=lambda row: row["step"])  # stable: training and evaluation of one step keep their order
    return found, damaged


def read_result(run: Path) -> tuple[dict[str, Any] | None, str]:
    """What result.json says, `None` before the run is complete; and what is wrong with the file, or ""."""
    try:
        result = json.loads(read_regular(run / "result.json"))
        if not isinstance(result, dict):
            raise ValueError(f"it holds a {type(result).__name__}")
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, " ".join(str(getattr(error, "strerror", None) or error).split())[:120]
    return result, ""


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row that are metrics: `train/...` and `eval/...`, finite."""
    return {
        name: value
        for name in row
        if name.startswith(("train/", "eval/")) and (value := number(row[name])) is not None
    }


def number(value: Any) -> float | None:
    """A finite JSON number, of which sums stay finite, or `None` for anything else."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return value if known else None  # NaN is not below either


def parsed_row(line: str) -> dict[str, Any] | None:
    """A line of metrics.jsonl, or `None` for a damaged one, or one that a killed process did not finish."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    sound = isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < 2**53
    return row if sound else None
