"""The ledger of a run: digests of what its steps computed, equal on any number of devices.

    ledger.jsonl    {"ledger": 1, "from": 0, "recipe": ..., "data": {...}, "computed": {...}}
                    {"step": 40, "after": 20, "gradient": "91c4...", "parameters": ..., ...}

A row has the digests of `run.state_digest` after its step, and names the row before it, so that a
lost one is found. A step that is one program has no gradient digest. A head describes what computes
the rows that follow. The first process writes a head, and so does each process that continues with
other programs, with other data or on another chip. Processes that compute the same bits compare the
rows that they compute again. Others, and those that need not compute the same bits, replace them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...base import DeviceFault, Fact, RunError
from ...base.json_types import as_stored, part
from ...data.compared import changed_data, texts
from ..placement import device_names
from ..run_schedule import Agenda
from ..session import Session
from ..state_digest import Digested, Pending
from .checkpointing import Saver
from .run_folder import RunFolder
from .run_reader import (
    DIGESTS,
    LEDGER,
    LEDGER_VERSION,
    Rows,
    StoredLedger,
    changed_programs,
    holes,
    read_ledger,
    read_processes,
    sha_of,
    without_portions,
)


def head_of(session: Session) -> dict[str, Any]:
    """Returns the head for the rows of `session`. Traces the step."""
    devices = None if session.layout.exact else session.layout.devices
    return {
        "recipe": sha_of(session.recipe.describe()),
        "data": texts(session.data_compared),
        "computed": {**session.computed(), "chip": session.machine.chip, "devices": devices},
    }


def check_unchanged(run: Path, session: Session) -> None:
    """Raises `RunError` if `session` would not compute what the run folder `run` contains, because
    its code was edited or its data is other data. With other versions of JAX or chipwise, whose
    traces differ too, compares only the data."""
    processes = read_processes(run)
    changes = changed_programs(processes, session.computes())
    kinds = [part(one, "devices").get("kind") for one in processes if one["event"] == "start"]
    # Another chip has other kernels anyway
    own = ("kernels",) if session.machine.kind in kinds[-1:] else ()
    edited = [change for change in changes if change[0] in ("code", "evaluation", *own)]
    if edited and not any(name.startswith("versions.") for name, _, _ in changes):
        raise RunError("finished-run-of-other-programs", path=str(run), changes=edited)
    stored = read_ledger(run)
    if stored is not None:
        check_data(run, stored.heads[-1]["data"], texts(session.data_compared))


def check_data(run: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises `RunError` if the digests of the data `before` and `now` differ."""
    for name, what in changed_data(before, now):
        raise RunError("ledger-of-other-data", run=str(run), name=name, what=what)


class Ledger:
    """Writes a run's ledger, and compares the devices' copies of the state at its steps.

    *Arguments:* `folder`: only on host 0, which alone reads and writes the file. `saver`: knows on
    every host whether there is a folder. Without a folder, nothing is done. `changed`: programs or
    data may differ from those of the run so far.

    *Fields:* `holes`: facts about rows that were lost.

    Raises `RunError` for other data, and like `check_unchanged` for a run that needs no step,
    unless `changed`. Methods that read rows raise `DeviceFault` if devices have different copies or
    if a row that is computed again differs.
    """

    def __init__(
        self,
        session: Session,
        folder: RunFolder | None,
        saver: Saver,
        agenda: Agenda,
        changed: bool = False,
    ):
        self.session, self.agenda, self.saver = session, agenda, saver
        self._folder = folder
        self._pending: tuple[int, list[Pending]] | None = None
        self._again: Rows | None = None  # rows after the step with which it begins
        self._begin = self._taken = session.step
        self.holes: list[Fact] = []
        if saver.run is not None:
            session.watched = agenda.ledger
        if folder is not None:
            stored = read_ledger(folder.path)
            self.holes = list(holes(folder.path, stored))
            self._go_on(folder, stored)
            if not changed and session.step >= agenda.last:
                check_unchanged(folder.path, session)
            elif not changed and stored is not None:
                check_data(folder.path, stored.heads[-1]["data"], texts(session.data_compared))

    def take(self, *, last: bool = False) -> None:
        """Starts the digests of the step that was started last, if that step has a row or is the
        `last` one."""
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
        self.session.verifier.collect(step)
        digested = self.session.programs.digests.read(pending)
        self._agree(step, digested)
        if self._folder is None:
            return
        if self._again is None:  # before a save too, or its head would say nothing of these steps
            self._again = self._open(self._folder)
        if step in self.agenda.ledger:
            self._write(self._folder, self._again, step, digested.values)

    def agree(self) -> None:
        """Compares the devices now."""
        self._agree(self.session.step, self.session.programs.digests.read(self.session.digest()))

    def begin(self) -> None:
        """Begins again after the session's step."""
        self._pending, self._again = None, None
        self._begin = self._taken = self.session.step
        if self._folder is not None:
            self._go_on(self._folder, read_ledger(self._folder.path))

    def _go_on(self, folder: RunFolder, stored: StoredLedger | None) -> None:
        rows = stored.rows if stored else {}
        folder.ledger = max((step for step in rows if step <= self._begin), default=0)

    def forget(self, after: int) -> None:
        """Removes the rows after a step: a device may have computed wrongly in these."""
        if self._folder is not None and (stored := read_ledger(self._folder.path)) is not None:
            rows = {step: row for step, row in stored.rows.items() if step <= after}
            _put(self._folder, stored, stored.heads, rows)

    def digest(self) -> str | None:
        """Returns `StoredLedger.digest` of the file. Returns `None` without one, and on hosts other
        than the first."""
        stored = None if self._folder is None else read_ledger(self._folder.path)
        return None if stored is None else stored.digest

    def _agree(self, step: int, digested: Digested) -> None:
        if not digested.unlike or not self.session.layout.exact:
            return
        groups = sorted({group for unlike in digested.unlike.values() for group in unlike})
        devices = device_names(self.session.placement, groups)
        facts = {
            "step": step,
            "devices": devices,
            "count": self.session.placement.groups,
            "groups": groups,
        }
        raise DeviceFault("devices-unlike", **facts, what=sorted(digested.unlike))

    def _write(self, folder: RunFolder, again: Rows, step: int, values: dict[str, str]) -> None:
        row = {name: values[name] for name in DIGESTS if name in values}
        after, folder.ledger = folder.ledger, step
        before = again.pop(step, None)
        if before is not None:
            differing = [n for n in DIGESTS if n in before and n in row and before[n] != row[n]]
            if differing:
                raise DeviceFault("ledger-differs", step=step, run=str(folder.path), what=differing)
            return
        folder.append(LEDGER, {"step": step, "after": after, **row})

    def _open(self, folder: RunFolder) -> Rows:
        """Begins or continues the file. *Returns* the rows that will be computed again."""
        stored = read_ledger(folder.path)
        now = as_stored(head_of(self.session), str)
        head = {"ledger": LEDGER_VERSION, "from": self._begin, **now}
        if stored is None:
            folder.replace(LEDGER, [head])
            return {}
        later = {step: row for step, row in stored.rows.items() if step > self._begin}
        heads, rows = stored.heads, stored.rows
        since = [stored.head(self._begin + 1), *(h for h in heads if h["from"] > self._begin)]
        other = any(
            one["computed"] != now["computed"]
            or any(changed_data(one["data"], now["data"]))
            or without_portions(one["data"]) != without_portions(now["data"])
            for one in since
        )
        if other:
            heads = [*(h for h in heads if h["from"] < self._begin), head]
        if other or not self.session.layout.exact:  # they need not come out again
            rows = {step: row for step, row in rows.items() if step not in later}
            later = {}
        _put(folder, stored, heads, rows)
        return later


def _put(folder: RunFolder, stored: StoredLedger, heads: list[dict[str, Any]], rows: Rows) -> None:
    after = {step: {"after": stored.after[step]} for step in rows if step in stored.after}
    lines = [(h["from"], 1, h) for h in heads] + [
        (s, 0, {"step": s, **after.get(s, {}), **row}) for s, row in rows.items()
    ]
    folder.replace(LEDGER, [line for *_, line in sorted(lines, key=lambda line: line[:2])])
