"""The ledger of a run: digests of what its steps computed, equal on any number of devices.

    ledger.jsonl    {"ledger": 1, "from": 0, "recipe": ..., "data": {...}, "computed": {...}}
                    {"step": 40, "gradient": "91c4...", "parameters": ..., "state": ..., "optimizer": ...}

A row has the digests of `engine.state_digest` after its step; a step that is one program has no gradient of
its own. A head says what computes the rows that follow: the first process writes one, and each one that goes
on by other programs or on another chip. Processes that compute the same bits compare the rows that they make
again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..atomic import read_inside
from ..data.sources import data_digest
from ..errors import DeviceFault, RunError
from ..machine.fingerprint import this_machine
from .agenda import Agenda
from .placement import device_names
from .run_folder import RunFolder
from .saver import Saver
from .session import Session
from .state_digest import Digested, Pending

FILE = "ledger.jsonl"
VERSION = 1
MOST = 1 << 32  # bytes
NAMES = ("gradient", "parameters", "state", "optimizer")

Rows = dict[int, dict[str, str]]


@dataclass(frozen=True)
class StoredLedger:
    """What a ledger holds. *Fields:* `heads` in their order; `rows`: step to digests by name."""

    heads: list[dict[str, Any]]
    rows: Rows

    @property
    def digest(self) -> str:
        """SHA-256 of the recipe's and the data's digests, and of all rows: equal on any number of devices."""
        what = [self.heads[0].get(name) for name in ("recipe", "data")]
        return _sha([what, sorted(self.rows.items())])

    def head(self, step: int) -> dict[str, Any]:
        """The head of the row of `step`."""
        return next((h for h in reversed(self.heads) if h["from"] < step), self.heads[0])


def head_of(session: Session) -> dict[str, Any]:
    """The head for rows that `session` makes. Traces the step, and reads data that is in memory."""
    task = session.recipe.task
    chip = session.machine.kind if session.machine.platform != "cpu" else this_machine().cpu
    devices = None if session.layout.exact else session.layout.devices
    return {
        "recipe": _sha(session.recipe.describe()),
        "data": {"training": data_digest(task.train), "evaluation": data_digest(task.eval)},
        "computed": {**session.computed(), "chip": chip, "devices": devices},
    }


def read_ledger(run: Path) -> StoredLedger | None:
    """The ledger of the run folder `run`, `None` if there is none or an empty one. Raises `RunError` for one
    that cannot be read, is of another version, or has a damaged line other than the last, which a killed
    process leaves."""
    file = run / FILE
    try:
        lines = read_inside(file, MOST).decode("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError("file-unreadable", path=str(file), reason=error.strerror or str(error)) from error
    heads: list[dict[str, Any]] = []
    rows: Rows = {}
    for number, line in enumerate(lines[:-1], 1):
        row = _parsed(line)
        if row is not None and "ledger" in row and row["ledger"] != VERSION:
            text = "{path} is a ledger of version {version}, expected {expected}: read it with its chipwise."
            version = str(row["ledger"])[:40]
            raise RunError("ledger-version", text, path=str(file), version=version, expected=VERSION)
        if row is not None and "ledger" in row:
            heads.append(row)
        elif row is not None and heads and row["step"] not in rows:
            rows[row["step"]] = {name: row[name] for name in NAMES if name in row}
        else:
            text = "Line {line} of {path} is no row of a ledger: it was edited or damaged. Restore the file."
            raise RunError("ledger-damaged", text, path=str(file), line=number)
    return StoredLedger(heads, rows) if heads else None


def _parsed(line: str) -> dict[str, Any] | None:
    """The head or the row in a line, `None` for anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    if "ledger" in row:
        sound = type(row.get("from")) is int and isinstance(row.get("data"), dict)
        return row if row["ledger"] != VERSION or (sound and isinstance(row.get("computed"), dict)) else None
    values = [row[name] for name in NAMES if name in row]
    sound = (
        type(row.get("step")) is int
        and 0 < row["step"] < 2**53
        and len(values) == len(row) - 1
        and bool(values)
    )
    return row if sound and all(isinstance(v, str) and len(v) == 16 for v in values) else None


class Ledger:
    """Writes a run's ledger, and compares the devices' copies of the state at its steps.

    *Arguments:* `folder`, only on host 0, which alone reads and writes the file; `saver`, of which a host
    knows whether there is a folder: without one, nothing is done; `changed`: programs or data may differ
    from those of the run so far.

    What reads rows raises `DeviceFault` if devices have different copies, and `RunError` if a row that is
    made again differs, or for the data of another run.
    """

    def __init__(
        self, session: Session, folder: RunFolder | None, saver: Saver, agenda: Agenda, changed: bool = False
    ):
        self.session, self.agenda, self.saver = session, agenda, saver
        self._folder, self._changed = folder, changed
        self._pending: tuple[int, list[Pending]] | None = None
        self._again: Rows | None = None  # rows after the step with which this process begins
        self._begin = self._taken = session.step
        if saver.run is not None:
            session.watched = agenda.ledger

    def take(self, *, last: bool = False) -> None:
        """Starts the digests of the step that was started last, if it has a row, or is the `last` one."""
        step = self.session.step
        due = step in self.agenda.ledger or last
        if self.saver.run is not None and due and step > self._taken:
            self.collect()
            self._taken, self._pending = step, (step, self.session.digest())

    def collect(self) -> None:
        """Reads what `take` started."""
        if self._pending is None:
            return
        (step, pending), self._pending = self._pending, None
        digested = self.session.programs.digests.read(pending)
        if digested.unlike and self.session.layout.exact:
            self._fault(step, digested)
        if step in self.agenda.ledger and self._folder is not None:
            self._write(self._folder, step, digested.values)

    def digest(self) -> str | None:
        """`StoredLedger.digest` of the file; `None` without one, and on hosts other than the first."""
        stored = None if self._folder is None else read_ledger(self._folder.path)
        return None if stored is None else stored.digest

    def _fault(self, step: int, digested: Digested) -> None:
        groups = sorted({group for unlike in digested.unlike.values() for group in unlike})
        devices = device_names(self.session.placement, groups)
        text = (
            "After step {step}, {devices:list} of {count} groups of devices hold other bits ({what:and}) "
            "than the rest. Nothing was saved: leave it out or test it, and start again from the checkpoint."
        )
        facts = {"step": step, "devices": devices, "count": self.session.placement.groups, "groups": groups}
        raise DeviceFault("devices-unlike", text, **facts, what=sorted(digested.unlike))

    def _write(self, folder: RunFolder, step: int, values: dict[str, str]) -> None:
        if self._again is None:
            self._again = self._open(folder)
        row = {name: values[name] for name in NAMES if name in values}
        before = self._again.pop(step, None)
        if before is not None:
            differing = [n for n in NAMES if n in before and n in row and before[n] != row[n]]
            if differing:
                text = (
                    "Step {step} of {run} was made again, and {what:and} differ from the ledger: a device "
                    "computed wrongly, now or then, or its ledger was edited. Start over with --fresh."
                )
                raise DeviceFault("ledger-differs", text, step=step, run=str(folder.path), what=differing)
            return
        folder.append(FILE, {"step": step, **row})

    def _open(self, folder: RunFolder) -> Rows:
        """Begins or continues the file. *Returns* the rows to be made again."""
        stored = read_ledger(folder.path)
        now = json.loads(json.dumps(head_of(self.session), default=str))
        head = {"ledger": VERSION, "from": self._begin, **now}
        if stored is None:
            folder.replace(FILE, [head])
            return {}
        before = stored.heads[-1]
        for name, digest in now["data"].items():
            there = before["data"].get(name)
            if digest != there and None not in (digest, there) and not self._changed:
                text = (
                    "{run} was trained on other {name} data (digest {there}, now {here}): give it the run's "
                    "data, or go on with --changed-code."
                )
                facts = {"name": name, "there": str(there)[:12], "here": digest[:12]}
                raise RunError("ledger-of-other-data", text, run=str(folder.path), **facts)
        later = {step: row for step, row in stored.rows.items() if step > self._begin}
        heads, rows = stored.heads, stored.rows
        if before["computed"] != now["computed"] or before["data"] != now["data"]:
            heads = [*(h for h in heads if h["from"] < self._begin), head]
            rows = {step: row for step, row in rows.items() if step not in later}
            later = {}
        lines = [(h["from"], 1, h) for h in heads] + [(s, 0, {"step": s, **row}) for s, row in rows.items()]
        folder.replace(FILE, [line for *_, line in sorted(lines, key=lambda line: line[:2])])
        return later


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
