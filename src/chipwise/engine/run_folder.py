"""The run folder as a training process writes it. `stored` reads it."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import math
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import psutil

from ..errors import ChipwiseError, DivergedError, RunError, Stopped
from ..machine.fingerprint import this_machine
from .best import FOLDER
from .events import PREFIX, Events
from .stored import disagreement, newest_checkpoint, parsed_row, read_result, stored_recipe

if TYPE_CHECKING:
    from .session import Session


class RunFolder:
    """A folder that one process at a time may train in.

        recipe.json      the recipe as run
        metrics.jsonl    one object a log step: step, epoch, train/..., eval/..., speeds
        processes.jsonl  one object when a process starts (or resumes) and one when it ends
        events.out.*     the same for TensorBoard, but for what is not finite
        checkpoints/     Orbax, the newest three
        result.json      written when the run is complete

    A metric that is not finite is `null` there, since JSON has no word for it.

    Raises `RunError` when the folder cannot be made or written, is in use by another process, has
    too little space, or holds a run of another recipe. Nothing is written before these checks pass,
    but for the folder itself and its lock.
    """

    def __init__(self, path: str | Path, recipe: dict[str, Any], needed_bytes: int, fresh: bool = False):
        self.path = Path(path).absolute()
        self._lock: Any = None
        self._events: Events | None = None
        existed = True
        try:
            place = next(p for p in (self.path, *self.path.parents) if p.exists())
            if not place.is_dir():
                raise RunError("run-is-a-file", path=str(place))
            existed = place == self.path
            if not os.access(place, os.W_OK | os.X_OK):
                raise RunError("run-unwritable", path=str(path), folder=str(place))
            free = shutil.disk_usage(place).free
            if free < needed_bytes:
                raise RunError("run-without-space", path=str(path), free=free, needed=needed_bytes)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = hold(self.path)
            if fresh:
                self._clear()
            self._agree(recipe)
        except OSError as error:
            if self._lock is not None and not existed:  # ours alone, and nothing in it yet
                self._leave_nothing()
            self.close()
            raise self._error(error) from error
        except BaseException:
            self.close()
            raise

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drops metric lines after `step`, which a resumed run will write again; returns the others, with NaN
        for the metrics that were not finite."""
        file = self.path / "metrics.jsonl"
        kept = []
        try:
            if file.exists():
                for line in file.read_text(errors="replace").splitlines():
                    row = parsed_row(line)
                    if row is not None and row["step"] <= step:
                        kept.append({k: math.nan if v is None else v for k, v in row.items()})
                self._replace(file, "".join(_json(row) + "\n" for row in kept))
        except OSError as error:
            raise self._error(error) from error
        self._purge = step + 1 if kept else None
        import tensorboardX  # noqa: F401 (takes a second, for which training should not wait)

        return kept

    _purge: int | None = None

    def log(self, row: dict[str, Any]) -> None:
        """Appends one line of metrics and the finite ones of its numbers as TensorBoard scalars."""
        try:
            with open(self.path / "metrics.jsonl", "a") as file:
                file.write(_json(row) + "\n")
            if self._events is None:
                self._events = Events(self.path, self._purge)
            finite = {
                name: float(value)
                for name, value in row.items()
                if isinstance(value, (int, float)) and math.isfinite(value) and name != "step"
            }
            self._events.add(row["step"], finite)
        except OSError as error:
            raise self._error(error) from error

    @contextlib.contextmanager
    def process(self, session: Session) -> Iterator[None]:
        """Notes in processes.jsonl that this process starts at the session's step, and how it ends.

        `how` is "done", "stopped", "diverged" or "failed"; `code` that of the error. A process without an end
        was killed, or still runs: `stored.StoredRun.running` tells.
        """
        here = psutil.Process()
        start = {"pid": here.pid, "started": here.create_time(), "host": socket.gethostname()}
        machine = this_machine(session.placement.devices).to_json()
        self._note("start", step=session.step, **start, devices=session.describe(), machine=machine)
        how, code = "failed", None
        try:
            yield
            how = "done"
        except BaseException as error:
            how = "stopped" if isinstance(error, Stopped) else how
            how = "diverged" if isinstance(error, DivergedError) else how
            code = error.code if isinstance(error, ChipwiseError) else type(error).__name__
            raise
        finally:
            with contextlib.suppress(RunError):  # a full disk must not hide why the run ends
                self._note("end", step=session.step, how=how, code=code)

    def _note(self, event: str, **facts: Any) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        try:
            with open(self.path / "processes.jsonl", "ab+") as file:
                if file.tell() and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                    file.write(b"\n")  # a process was killed in the middle of a line
                file.write((_json({"event": event, "time": now, **facts}) + "\n").encode())
        except OSError as error:
            raise self._error(error) from error

    def finish(self, result: dict[str, Any]) -> None:
        """Writes `result.json`, whole or not at all."""
        try:
            self._replace(self.path / "result.json", _json(result, indent=2) + "\n")
        except OSError as error:
            raise self._error(error) from error

    def result(self) -> dict[str, Any] | None:
        """What `finish` wrote; `None` when it did not, or when that is damaged."""
        return read_result(self.path)[0]

    def close(self) -> None:
        if self._events is not None:
            # What it still holds are copies of what metrics.jsonl has: not worth an error that would
            # hide the one for which the run ends.
            with contextlib.suppress(OSError):
                self._events.close()
            self._events = None
        if self._lock is not None:
            with contextlib.suppress(OSError):  # a full disk, when the process's number was not written
                self._lock.close()  # releases it
            self._lock = None

    def _leave_nothing(self) -> None:
        for name in ("recipe.json.part", "lock"):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _clear(self) -> None:
        # Somebody's home folder named by mistake may hold checkpoints of something else.
        if not (self.path / "recipe.json").exists():
            others = sorted(p.name for p in self.path.iterdir() if p.name != "lock")
            if others:
                raise RunError("run-fresh-elsewhere", path=str(self.path), files=others[:3])
        for name in ("recipe.json", "metrics.jsonl", "processes.jsonl", "result.json"):
            (self.path / name).unlink(missing_ok=True)
        for file in self.path.glob(f"{PREFIX}.out.tfevents.*"):
            file.unlink()
        for name in ("checkpoints", FOLDER):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def _agree(self, recipe: dict[str, Any]) -> None:
        file = self.path / "recipe.json"
        given = json.loads(json.dumps(recipe))
        if file.exists():
            changes = disagreement(stored_recipe(self.path), given)
            if changes:
                raise RunError("run-of-another-recipe", path=str(self.path), changes=changes)
        else:
            self._replace(file, json.dumps(given, indent=2) + "\n")

    def _replace(self, file: Path, text: str) -> None:
        temporary = file.with_name(file.name + ".part")
        temporary.write_text(text)
        os.replace(temporary, file)

    def _error(self, error: OSError) -> RunError:
        facts = {"path": str(self.path), "checkpoint": newest_checkpoint(self.path)}
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return RunError(
            "run-disk-full" if full else "run-unusable", **facts, reason=error.strerror or str(error)
        )


def hold(folder: Path) -> BinaryIO:
    """The open lock file of `folder`, which is held until it is closed or the process ends.

    Raises `RunError` while another process holds it.
    """
    lock = open(folder / "lock", "a+b", buffering=0)  # noqa: SIM115 (held for the run's life)
    try:
        # The kernel releases it when the process ends, however it ends: no stale locks.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().decode(errors="replace").strip() or "another process"
        lock.close()
        raise RunError("folder-in-use", path=str(folder), holder=holder) from None
    with contextlib.suppress(OSError):  # a full disk, of which the folder's own files will speak
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    return lock


def _json(value: dict[str, Any], indent: int | None = None) -> str:
    """As JSON, which has neither NaN nor infinities: `null` stands for both."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
