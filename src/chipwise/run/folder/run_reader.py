"""Reads a run folder. Takes no lock, writes nothing, runs no code.

The folder may come from anywhere, and from a killed process, so every part may be missing or
damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ...base import Fact, RecipeError, RunError, fact
from ...base.figures import known
from ...base.files import read_inside
from ...base.json_types import Misfit, as_stored, json_object, part, typed
from ...recipe.direction import DIRECTIONS, LOWER, direction
from ...recipe.duration import Clock
from ...recipe.recipe import FROM_WEIGHTS, Changes, difference
from .early_stopping import Kept

MOST_ROWS = 1 << 30  # bytes of metrics.jsonl
BESIDE = ("source", "classes", "texts", "read", "readings", "packs")
"""What `recipe.json` says beside the settings of the recipe."""
_COMPILERS = {"versions.jaxlib", "versions.libtpu"}
_DIGITS = 15  # at most, of a step or a number of examples; a file with more is damaged


@dataclass(frozen=True)
class StoredRun:
    """A run folder."""

    path: Path
    """The folder."""
    recipe: dict[str, Any]
    """The recipe as run."""
    rows: list[dict[str, Any]]
    """The rows of metrics, sorted by step."""
    result: dict[str, Any] | None
    """The content of result.json, `None` before the run is complete."""
    processes: list[dict[str, Any]]
    """The events of processes.jsonl in order."""
    problems: list[Fact]
    """The damaged files."""

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The start events of the first process and of those that resumed."""
        return [event for event in self.processes if event["event"] == "start"]

    @property
    def checkpoints(self) -> list[int]:
        """The steps of its checkpoints, in order."""
        return steps_in(self.path / "checkpoints")

    @property
    def clock(self) -> Clock | None:
        """The run's clock, from the stored recipe, or `None` if the recipe lacks a field."""
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
        """How the command line built the recipe, or `None` for a run of a Python program."""
        source = self.recipe.get("source")
        if not isinstance(source, dict) or not isinstance(source.get("recipe"), str):
            return None
        settings = source.get("set")
        sound = isinstance(settings, list) and all(isinstance(text, str) for text in settings)
        return source if sound and isinstance(source.get("data"), str | None) else None

    @property
    def better(self) -> dict[str, str]:
        """The better values of its metrics, as the result or the last process states them."""
        stated = part(self.result or next(reversed(self.starts), {}), "better")
        return {name: way for name, way in stated.items() if way in DIRECTIONS}

    @property
    def kept(self) -> Kept | None:
        """What `keep_best` kept, from the result, or from the evaluations of an unfinished run."""
        last: dict[str, Any] = next(reversed(self.starts), {})
        for stated in ((self.result or {}).get("best"), last.get("best")):
            if isinstance(stated, dict):
                best = best_row(self.rows, stated.get("metric"), self.better) or {}
                try:
                    kept = typed(Kept, {**best, **stated})
                except Misfit:
                    continue
                if 0 <= kept.step < 2**53:
                    return kept
        return None

    @property
    def running(self) -> bool:
        """Whether a process of this host is training here now, judged by its pid and start time."""
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
    """The run folder `path`. Raises `RunError` when it has no run, or one that cannot be read."""
    path = Path(path)
    recipe, (rows, damaged), (result, reason) = (
        stored_recipe(path),
        read_rows(path),
        read_result(path),
    )
    problems = []
    if damaged:
        problems.append(fact("metrics-damaged", lines=damaged, count=len(damaged)))
    if reason:
        problems.append(fact("result-damaged", reason=reason))
    return StoredRun(path, recipe, rows, result, read_processes(path), problems)


def read_processes(path: Path) -> list[dict[str, Any]]:
    """Reads the events of processes.jsonl without damaged lines. Raises as `read_rows`."""
    rows = map(parsed_row, _lines(path / "processes.jsonl"))
    return [row for row in rows if row is not None and row.get("event") in ("start", "end")]


def changed_programs(processes: Sequence[Mapping[str, Any]], computed: dict[str, Any]) -> Changes:
    """Compares the programs of a run's last process with those of one that is to continue it,
    `Session.computes`. *Returns* the differences (what, before, now). Another chip, or without
    exact sums another number of devices, has other programs anyway. Versions of packages other than
    compilers count only if the code differs too."""
    all_before = [event.get("computed") for event in processes if event["event"] == "start"]
    before = next((one for one in reversed(all_before) if isinstance(one, dict)), None)
    if before is None:
        return []
    if before.get("layout") != computed["layout"]:
        before, computed = (
            {k: v for k, v in one.items() if k != "code"} for one in (before, computed)
        )
    # One of them evaluates nothing
    if None in (before.get("evaluation"), computed.get("evaluation")):
        before, computed = (
            {k: v for k, v in one.items() if k != "evaluation"} for one in (before, computed)
        )
    changes = [one for one in difference(before, computed) if one[0] != "layout"]
    if {"code", "evaluation"} & (names := {name for name, _, _ in changes}):
        return changes
    return [one for one in changes if not one[0].startswith("versions.") or names & _COMPILERS]


def stored_recipe(run: Path) -> dict[str, Any]:
    """The content of `recipe.json` in the run folder `run`. Raises `RunError` when it is missing or
    damaged."""
    file = run / "recipe.json"
    if (content := _content(file)) is None:
        raise RunError("not-a-run", path=str(run))
    try:
        return json_object(content)
    except (ValueError, RecursionError) as error:
        raise RunError(
            "recipe-json-damaged", path=str(file), run=str(run), reason=str(error)
        ) from error


def settings_in(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a `recipe.json`, as `Recipe.describe` has them."""
    return {name: value for name, value in recipe.items() if name not in BESIDE}


def disagreement(
    stored: dict[str, Any], given: dict[str, Any], *, beginning: bool = True
) -> Changes:
    """The differences of two descriptions of a recipe: (setting, stored, given). Ignores the
    recipe's origin (`source`), what is known of its texts, what was read of its model, names of
    classes that only one of them has, directions of metrics for which none was stored
    (`Task.better`) and, unless `beginning`, the initial weights."""
    both = stored, as_stored(given)
    named = all(d.get("classes") for d in both)
    ignored = set(BESIDE) - {"classes"} if named else set(BESIDE)
    a, b = ({k: v for k, v in d.items() if k not in ignored} for d in both)
    if not beginning:
        a, b = _of_any_weights(a), _of_any_weights(b)
    return [
        row
        for row in difference(a, b)
        if row[1] is not None or not row[0].startswith("task.better")
    ]


def _of_any_weights(described: dict[str, Any]) -> dict[str, Any]:
    task = described.get("task")
    if not isinstance(task, dict) or not isinstance(task.get("init"), str):
        return described
    return {**described, "task": {**task, "init": task["init"].partition(FROM_WEIGHTS)[0]}}


def newest_checkpoint(run: Path) -> int | None:
    """The step of the newest checkpoint of a run, or `None` without one."""
    return max(steps_in(run / "checkpoints"), default=None)


def steps_in(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in `folder`, in order."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    # A checkpoint gets its final name, the step, only when it is complete.
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < _DIGITS)


def read_rows(run: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows of metrics.jsonl, sorted by step, and the numbers of damaged lines.

    An incomplete last line, as a killed process leaves, is not counted as damaged. A missing file
    has no rows. Raises `RunError` for a file that cannot be read.
    """
    rows, damaged, lines = [], [], _lines(run / "metrics.jsonl")
    for line_number, line in enumerate(lines, 1):
        row = parsed_row(line)
        if row is not None:
            rows.append(row)
        elif line.strip() and line_number < len(lines):
            damaged.append(line_number)
    # Stable: training and evaluation of one step keep their order
    rows.sort(key=lambda row: row["step"])
    return rows, damaged


def _lines(file: Path) -> list[str]:
    """The lines of a file in a run folder, none if it is missing. Raises `RunError` if it cannot be
    read."""
    try:
        return read_inside(file, MOST_ROWS).decode("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError("file-unreadable", path=str(file), reason=error) from error


def _content(file: Path) -> bytes | None:
    """The bytes of a file in a run folder, `None` if it or the folder is missing. Raises `RunError`
    if it cannot be read."""
    try:
        return read_inside(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunError("file-unreadable", path=str(file), reason=error) from error


def read_media(run: Path) -> list[dict[str, Any]]:
    """The lines of media.jsonl, a text or a picture each, without damaged ones. Raises as
    `read_rows`."""
    rows = (parsed_row(line) for line in _lines(run / "media.jsonl"))
    return [
        row
        for row in rows
        if row is not None
        and isinstance(row.get("name"), str)
        and isinstance(row.get("text", row.get("png")), str)
    ]


def read_result(run: Path) -> tuple[dict[str, Any] | None, str]:
    """Reads result.json. *Returns* its content, or `None` before the run is complete. Also returns
    the reason if the file is damaged, otherwise "". Raises as `read_rows`."""
    if (content := _content(run / "result.json")) is None:
        return None, ""
    try:
        return json_object(content), ""
    except (ValueError, RecursionError) as error:
        return None, " ".join(str(error).split())[:120]


def best_row(
    rows: Sequence[Mapping[str, Any]], metric: Any, known: Mapping[str, str]
) -> dict[str, Any] | None:
    """Returns the `value` and the `step` of the first best value of a metric, and which way it is
    `better`. Returns `None` without any, and if that is not `known`."""
    better = direction(metric := str(metric), known)
    found = [(value, row["step"]) for row in rows if (value := number(row.get(metric))) is not None]
    if better is None or not found:
        return None
    value, step = min(found, key=lambda one: one[0] if better == LOWER else -one[0])
    return {"value": value, "step": step, "better": better}


# ---- the ledger: see `run.folder.ledger`

LEDGER = "ledger.jsonl"
LEDGER_VERSION = 1
_PORTION = re.compile(r" *\S+/\d+:\S+")  # a part of `data.compared.texts`, as contents/40
DIGESTS = ("gradient", "parameters", "state", "optimizer")

Rows = dict[int, dict[str, str]]


@dataclass(frozen=True)
class StoredLedger:
    """The content of a ledger."""

    heads: list[dict[str, Any]]
    """The heads in their order."""
    rows: Rows
    """Step to digests by name."""
    after: dict[int, int]
    """The step of each row to that of the row before it, 0 for the first."""
    zeros: list[int]
    """The numbers of lines with zero bytes, which a power cut leaves."""

    @property
    def digest(self) -> str:
        """SHA-256 of the recipe's and the data's digests, and of all rows: equal on any number of
        devices. Portions of the data do not count: a slow disk has fewer."""
        return self._digest(without_portions(self.heads[0]["data"]))

    def was(self, stated: Any) -> bool:
        """Whether `stated` is the `digest`, or that of earlier versions, which had the portions."""
        return stated in (self.digest, self._digest(self.heads[0]["data"]))

    def _digest(self, data: dict[str, Any]) -> str:
        return sha_of([[self.heads[0].get("recipe"), data], sorted(self.rows.items())])

    def head(self, step: int) -> dict[str, Any]:
        """The head of the row of `step`."""
        return next((h for h in reversed(self.heads) if h["from"] < step), self.heads[0])


def without_portions(data: Mapping[str, str | None]) -> dict[str, str | None]:
    """The texts of `data.compared` without the digests of some of the examples."""
    return {name: text and _PORTION.sub("", text) for name, text in data.items()}


def read_ledger(run: Path) -> StoredLedger | None:
    """The ledger of the run folder `run`, `None` if there is none or an empty one. Raises
    `RunError` for one that cannot be read, is of another version, or has a damaged line. The last
    one may be, as a killed process leaves it, and so may those with zero bytes, which a power cut
    leaves: see `holes`."""
    file = run / LEDGER
    heads: list[dict[str, Any]] = []
    rows: Rows = {}
    after: dict[int, int] = {}
    *lines, last = _lines(file) or [""]
    zeros = [len(lines) + 1] if "\0" in last else []
    for number, line in enumerate(lines, 1):
        row = _parsed(line.strip("\0"))
        if "\0" in line:
            zeros.append(number)
        if row is not None and "ledger" in row and row["ledger"] != LEDGER_VERSION:
            version = str(row["ledger"])[:40]
            raise RunError(
                "ledger-version", path=str(file), version=version, expected=LEDGER_VERSION
            )
        if row is not None and "ledger" in row:
            heads.append(row)
        elif row is not None and heads and row["step"] not in rows:
            rows[row["step"]] = {name: row[name] for name in DIGESTS if name in row}
            if "after" in row:
                after[row["step"]] = row["after"]
        elif "\0" not in line:
            raise RunError("ledger-damaged", path=str(file), line=number)
    return StoredLedger(heads, rows, after, zeros) if heads else None


def holes(run: Path, ledger: StoredLedger | None) -> Iterator[Fact]:
    """Facts about the rows that the ledger of a run has lost: those that later rows or checkpoints
    name, and lines of zeros."""
    rows, after, zeros = (ledger.rows, ledger.after, ledger.zeros) if ledger else ({}, {}, [])
    named = {0, *after.values()}
    for step in steps_in(run / "checkpoints"):
        with contextlib.suppress(OSError, ValueError, RecursionError):  # reading it tells
            about = json_object(read_inside(run / "checkpoints" / str(step) / "about" / "metadata"))
            named.add(last if type(last := about.get("ledger")) is int else 0)
    file = str(run / LEDGER)
    if steps := sorted(named - {0, *rows}):
        yield fact("ledger-rows-missing", path=file, steps=steps)
    if zeros:
        yield fact("ledger-zeros", path=file, lines=sorted(zeros))


def _parsed(line: str) -> dict[str, Any] | None:
    """Returns the head or the row in a line, or `None` for anything else."""
    row = _object(line)
    if "ledger" in row:
        kinds = {"from": int, "data": dict, "computed": dict}
        sound = all(type(row.get(name)) is kind for name, kind in kinds.items())
        sound = sound and all(isinstance(one, str | None) for one in row["data"].values())
        return row if sound or row["ledger"] != LEDGER_VERSION else None
    values = [row[name] for name in DIGESTS if name in row]
    step, after = row.get("step"), row.get("after", 0)  # which earlier versions did not write
    sound = type(step) is type(after) is int and 0 <= after < step < 2**53
    sound = sound and 0 < len(values) == len(row) - 1 - ("after" in row)
    return row if sound and all(isinstance(v, str) and len(v) == 16 for v in values) else None


def _object(line: str) -> dict[str, Any]:
    """Returns the JSON object in a line, or an empty one for anything else."""
    try:
        return json_object(line)
    except (ValueError, RecursionError):
        return {}


def sha_of(value: Any) -> str:
    """Returns SHA-256 of a JSON value. Other values in it are replaced by their text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


# ---- rows


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite metrics `train/...` and `eval/...` of a row."""
    return {
        name: value
        for name in row
        if name.startswith(("train/", "eval/")) and (value := number(row[name])) is not None
    }


def number(value: Any) -> float | None:
    """Returns `value` if it is a JSON number below 1e300, so that sums stay finite. Otherwise
    returns `None`."""
    return value if known(value) else None


def parsed_row(line: str) -> dict[str, Any] | None:
    """The row in a line of metrics.jsonl, or `None` for a damaged or incomplete line."""
    row = _object(line)
    return row if type(row.get("step")) is int and 0 <= row["step"] < 2**53 else None
