"""What a run folder holds, read and nothing more: no lock is taken, nothing is written, no code is run."""

from __future__ import annotations

import os
import re
import shlex
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...engine.stored import read_result, read_rows, stored_recipe
from ...errors import RecipeError, RunError
from ...recipe.duration import Clock
from ...study.document import FILE
from ...words.facts import Fact, fact
from ...words.figures import one_line

_MOST = 2**53  # examples or steps, beyond which a file is damaged
_SHORT = 1 << 16  # bytes of an event file that hold its first two events


@dataclass(frozen=True)
class Start:
    """A process that logged to the run: when its first row was written (ISO 8601, UTC), and the step it
    began at: 0, or that of the checkpoint it resumed from."""

    when: str
    step: int


@dataclass(frozen=True)
class RunFiles:
    """A run folder's content.

    *Fields:* `rows`, the log's, by step; `damaged`, numbers of unreadable lines of metrics.jsonl (the last
    line of a killed process is none); `result`, of result.json, `None` before the run is complete;
    `problems`, a fact each for a file that cannot be read; `checkpoints`, their steps; `starts`, the
    processes as the event files tell; `holder`, who trains in the folder now, `None` when nobody does.
    """

    path: Path
    recipe: Mapping[str, Any]
    rows: list[dict[str, Any]]
    damaged: list[int]
    result: Mapping[str, Any] | None
    problems: list[Fact]
    checkpoints: list[int]
    starts: list[Start]
    holder: str | None

    @classmethod
    def read(cls, path: Path) -> RunFiles:
        """Raises `RunError` where `path` holds no run, or its recipe.json or metrics.jsonl cannot be read."""
        _refuse_a_folder_of_runs(path)
        try:
            recipe = stored_recipe(path)
        except RecursionError:
            raise RunError("recipe-json-too-deep", file=str(path / "recipe.json")) from None
        rows, damaged = read_rows(path)
        result, wrong = read_result(path)
        problems = [fact("story-result-unreadable", reason=one_line(wrong))] if wrong else []
        checkpoints = path / "checkpoints"
        return cls(
            path=path,
            recipe=recipe,
            rows=rows,
            damaged=damaged,
            result=result,
            problems=problems,
            # A checkpoint gets its final name, the step, only when it is complete.
            checkpoints=sorted(
                int(p.name) for p in checkpoints.glob("*") if re.fullmatch(r"\d{1,18}", p.name)
            ),
            starts=_starts(path / "tensorboard"),
            holder=holder(path / "lock"),
        )

    @property
    def resumes(self) -> list[Start]:
        return [start for start in self.starts if start.step > 0]

    @property
    def clock(self) -> Clock | None:
        """The run's clock, from the recipe as stored; `None` when that lacks what it takes."""
        task = self.recipe.get("task")
        train = task.get("train") if isinstance(task, dict) else None
        examples = train.get("examples") if isinstance(train, dict) else None
        batch, duration = self.recipe.get("batch"), self.recipe.get("duration")
        if not isinstance(examples, int) or not isinstance(batch, int) or not isinstance(duration, str):
            return None
        try:
            clock = Clock.for_run(examples, batch, duration)
        except RecipeError:
            return None
        return clock if max(examples, clock.total or 0) < _MOST else None

    @property
    def source(self) -> Mapping[str, Any] | None:
        """How the command line made the recipe; `None` for a run of a Python program."""
        found = self.recipe.get("source")
        if not isinstance(found, dict) or not isinstance(found.get("recipe"), str):
            return None
        settings = found.get("set")
        sound = isinstance(settings, list) and all(isinstance(text, str) for text in settings)
        return found if sound and isinstance(found.get("data"), str | None) else None


def command(*words: str) -> str:
    """Words as one line for a shell, quoted where they must be."""
    return shlex.join(one_line(word) for word in words)


def _refuse_a_folder_of_runs(path: Path) -> None:
    """Raises `RunError` that names the runs in `path`, where it is none but holds some."""
    if (path / "recipe.json").exists():
        return
    runs = sorted(file.parent for name in ("recipe.json", FILE) for file in path.glob(f"*/{name}"))
    if runs:
        raise RunError(
            "folder-of-runs",
            folder=str(path),
            runs=[run.name for run in runs],
            command=command("chipwise", "report", str(runs[0])),
        )


def _starts(folder: Path) -> list[Start]:
    """Each process that logs writes one event file, which says when it began and after which step."""
    found = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        try:
            with open(file, "rb") as opened:
                events = _events(opened.read(_SHORT))
        except OSError:
            continue  # it may go while a run is begun afresh; what it would add is a mark in a picture
        if events:
            when = datetime.fromtimestamp(events[0][0], UTC).isoformat(timespec="seconds")
            # A resumed process first says which step it will write next, in an event without a value.
            step = next((step - 1 for _, step, bare in events[1:2] if bare and step > 0), 0)
            found.append(Start(when, step))
    return sorted(found, key=lambda start: start.when)


def _events(data: bytes) -> list[tuple[float, int, bool]]:
    """The first two events of a file, as (seconds since 1970, step, without a value).

    TFRecord: length (8 bytes), its checksum (4), the event, its checksum (4). The event is a protocol
    buffer whose field 1 is the time, a double; 2 the step, a varint; 5 what was logged.
    """
    found: list[tuple[float, int, bool]] = []
    at = 0
    while len(found) < 2 and at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = data[at + 12 : at + 12 + length]
        at += 16 + length
        if len(event) < length or length < 9 or event[0] != 0x09:
            break
        (when,) = struct.unpack_from("<d", event, 1)
        if not 0 <= when < 1e11:
            break
        step, place, next_tag = 0, 9, event[9] if length > 9 else 0
        if next_tag == 0x10:
            place, shift = 10, 0
            while place < length and shift < 63:
                step |= (event[place] & 0x7F) << shift
                place, shift = place + 1, shift + 7
                if not event[place - 1] & 0x80:
                    break
        found.append((when, step, not (place < length and event[place] == 0x2A)))
    return found


def holder(lock: Path) -> str | None:
    """Who holds a run's lock, asked of the kernel: to try the lock would be to take it for a moment, in
    which a process that wants to train would be refused.

    Without Linux's list of locks the process named in the file is looked for, which is less sure.
    """
    try:
        there, named = lock.stat(), one_line(lock.read_text(errors="replace"))
    except OSError:
        return None
    named = named or "another process"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        found = re.fullmatch(r"process (\d{1,9}) on (.*)", named)
        return named if found and found[2] == socket.gethostname() and _alive(int(found[1])) else None
    inode = f":{there.st_ino}"
    held = any("FLOCK" in line and any(word.endswith(inode) for word in line.split()) for line in lines)
    return named if held else None


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True
