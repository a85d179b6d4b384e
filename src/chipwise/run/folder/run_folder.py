"""Writes the run folder of a training process. `run_reader` reads it."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ...base import ChipwiseError, DivergedError, RunError, Stopped, locks
from ...base.facts import plain
from ...base.figures import known
from ...base.files import is_full, open_inside, put_inside, put_on_disk, read_inside, to_write
from ...base.json_types import as_stored
from ...data.class_names import names_in
from ...data.compared import Data
from ...data.readings import packs, readings
from ...machine.fingerprint import this_machine
from ...machine.kernels import FILE as KERNELS, Kernels
from ...recipe.recipe import Recipe
from ...step.state import nbytes
from ..tracking import TRACKED
from .checkpoint import check_savable
from .early_stopping import FOLDER, EarlyStopping
from .media import Medium, row_of
from .run_reader import (
    changed_programs,
    disagreement,
    newest_checkpoint,
    read_media,
    read_processes,
    read_result,
    read_rows,
    stored_recipe,
)

if TYPE_CHECKING:
    from ..session import Session

PREFIX = "events"
MEDIA = "media.jsonl"
NAMES = (
    "metrics.jsonl",
    MEDIA,
    "ledger.jsonl",
    "processes.jsonl",
    "result.json",
    "recipe.json",
    KERNELS,
)
_MOST_DESCRIBED = 1 << 23  # characters of packs in recipe.json, which is read whole
MOST_MEDIA = 1 << 26  # bytes of all texts and pictures of a run
_SECONDS = 10.0  # between flushes of the TensorBoard file, each of which waits for the disk


class RunFolder:
    """A folder that one process at a time may train in.

        recipe.json      the recipe as run
        metrics.jsonl    one object a log step: step, epoch, train/..., eval/..., speeds
        ledger.jsonl     digests of what steps computed: see `run.folder.ledger`
        media.jsonl      texts and pictures that the user's code has logged: see `run.folder.media`
        processes.jsonl  one object when a process starts (or resumes) and one when it ends
        events.out.*     the finite numbers, the texts and the pictures, for TensorBoard
        checkpoints/     Orbax, the newest three
        kernels.textproto  with `On.kernels`: see `machine.kernels`. Those of processes before
                         one with `changed_code` are in kernels-DIGEST.textproto
        result.json      written when the run is complete
        tracked/         what was sent to other services: see `tracking`

    A metric that is not finite is `null` in JSON files.

    *Fields:* `path`. `data`: how far the run's data is compared when the run continues. `ledger`:
    the step of the ledger's last row.

    Raises `RunError` when the folder cannot be created or written, is in use by another process,
    has too little space, or has a run of another recipe. Before these checks, only the folder and
    its lock are written.
    """

    def __init__(
        self, path: str | Path, recipe: dict[str, Any], needed_bytes: int, fresh: bool = False
    ):
        self.path = Path(to_write(path, "run")).absolute()
        self.data: Data = {}
        self.ledger = 0
        self._lock: Any = None
        self._events: Events | None = None
        self._shown: set[tuple[int, str, bool]] = set()  # step, name and whether it is a text
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
            self._lock = locks.hold(self.path, *NAMES, "checkpoints", FOLDER, TRACKED)
            if fresh:
                self._clear()
            self._agree(recipe)
        except OSError as error:
            # This process made it, and it is still empty
            if self._lock is not None and not existed:
                self._remove_folder()
            self.close()
            raise self._error(error) from error
        except BaseException:
            self.close()
            raise

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, path: str | Path | None, session: Session, fresh: bool
    ) -> Iterator[RunFolder | None]:
        """A context with the open folder of a session's run. Yields `None` if there is no `path`,
        and on hosts other than the first, which alone writes."""
        if path is None or not session.placement.hosts.first:
            yield None
            return
        check_savable(session.abstract)
        recipe, needed = recorded(session.recipe), 4 * nbytes(session.abstract)
        with contextlib.closing(cls(path, recipe, needed, fresh)) as folder:
            folder.data = session.data_compared
            pace = session.placement.hosts.pace
            pace.folder = folder.place
            try:
                yield folder
            finally:
                pace.folder = None

    @property
    def place(self) -> Path:
        """The folder that this process locked, wherever it is now, for what is written there."""
        return self._lock.folder

    def rows(self, step: int) -> list[dict[str, Any]]:
        """The metric rows until `step`, with NaN for metrics that were not finite."""
        before = [row for row in read_rows(self.path)[0] if row["step"] <= step]
        return [{k: math.nan if v is None else v for k, v in row.items()} for row in before]

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Removes the metric rows after `step`, which a resumed run writes again, and the texts and
        pictures after it. *Returns* `rows(step)`."""
        rows = self.rows(step)
        if (self.path / "metrics.jsonl").exists():
            self.replace("metrics.jsonl", rows)
        media = [row for row in read_media(self.path) if row["step"] <= step]
        self._shown = {(row["step"], row["name"], "text" in row) for row in media}
        if (self.path / MEDIA).exists():
            self.replace(MEDIA, media)
        self._purge = step + 1 if rows else None
        import tensorboardX  # noqa: F401 (takes a second, which is better spent before training)

        return rows

    _purge: int | None = None

    def log(self, row: dict[str, Any]) -> None:
        """Appends a row to metrics.jsonl, and its finite numbers to the TensorBoard events."""
        self.append("metrics.jsonl", row)
        finite = {
            name: float(value) for name, value in row.items() if known(value) and name != "step"
        }
        self._event(row["step"], points(finite))

    def show(self, step: int, name: str, medium: Medium) -> bool:
        """Appends a text or a picture to media.jsonl and the TensorBoard events, unless it has one
        of that name and step. *Returns* whether there was room for it."""
        from tensorboardX.summary import image, text

        key, row = (step, name, isinstance(medium, str)), row_of(step, name, medium)
        if key in self._shown:
            return True
        file = self.path / MEDIA
        there = os.lstat(file).st_size if file.exists() else 0
        if there + len(row.get("png", "")) + 6 * len(row.get("text", "")) > MOST_MEDIA:
            return False
        self.append(MEDIA, row)
        self._shown.add(key)
        made = text(name, row["text"]) if "text" in row else image(name, medium, dataformats="HWC")
        self._event(step, made)
        return True

    def _event(self, step: int, summary: Any) -> None:
        with self.writing():
            if self._events is None:
                self._events = Events(self.place, self._purge)
            self._events.add(step, summary)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Appends a line to the file `name` of the folder."""
        with self.writing():
            handle = open_inside(self.place / name, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            with os.fdopen(handle, "ab+") as file:
                if file.tell() and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                    file.write(b"\n")  # a process was killed in the middle of a line
                file.write(_json(row).encode())

    def replace(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Replaces the file `name` of the folder by lines."""
        with self.writing():
            text = "".join(map(_json, rows))
            put_inside(self.place / name, text.encode())

    @contextlib.contextmanager
    def process(
        self, session: Session, best: EarlyStopping, changed_code: bool = False
    ) -> Iterator[None]:
        """A context that writes this process's start, with the rule of `best`, and its end to
        processes.jsonl. Raises `RunError` when the programs are not those of the run so far, unless
        `changed_code`.

        At the end, `how` is "done", "stopped", "diverged" or "failed", and `code` is the error's
        code. A process without an end was killed, or still runs: see
        `run_reader.StoredRun.running`.
        """
        here = psutil.Process()
        start = {
            "pid": here.pid,
            "started": here.create_time(),
            "host": socket.gethostname(),
            "best": best.rule,
            "better": best.known,
        }
        start["computed"] = computed = session.computes()
        if session.step and (changes := changed_programs(read_processes(self.path), computed)):
            if not changed_code:
                raise RunError("run-of-other-programs", path=str(self.path), changes=changes)
            start["changed"] = changes
        if (kernels := session.programs.kernels) is not None:
            self._put_kernels(kernels)
        machine = this_machine(session.placement.devices).to_json()
        self._note("start", step=session.step, **start, devices=session.describe(), machine=machine)
        how, code = "failed", None
        try:
            yield
            how = "done"
        except BaseException as error:
            # Or the loop was left
            how = "stopped" if isinstance(error, Stopped | GeneratorExit) else how
            how = "diverged" if isinstance(error, DivergedError) else how
            code = error.code if isinstance(error, ChipwiseError) else type(error).__name__
            raise
        finally:
            with contextlib.suppress(RunError):  # a full disk must not hide why the run ends
                verified = session.verifier.json()
                self._note("end", step=session.step, how=how, code=code, verified=verified)

    def _put_kernels(self, kernels: Kernels) -> None:
        """Writes the kernels of this process. Others that the run has used stay under their
        digest, as the ledger's earlier heads name them."""
        file, content = self.place / KERNELS, kernels.text.encode()
        with self.writing():
            if file.exists() and (before := read_inside(file)) != content:
                digest = hashlib.sha256(before).hexdigest()
                put_inside(file.with_stem(f"{file.stem}-{digest[:12]}"), before)
            put_inside(file, content)

    def _note(self, event: str, **facts: Any) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self.append("processes.jsonl", {"event": event, "time": now, **facts})

    def finish(self, result: dict[str, Any], trained: bool = True) -> None:
        """Writes `result.json` atomically. Unless `trained`, writes it only if there is none."""
        if not trained and self.result() is not None:
            return
        with self.writing():
            put_inside(self.place / "result.json", _json(result, indent=2).encode())

    def unfinish(self) -> None:
        """Removes `result.json`: the run is trained on."""
        with self.writing():
            (self.place / "result.json").unlink(missing_ok=True)

    def result(self) -> dict[str, Any] | None:
        """Returns the content of `result.json`, or `None` if it is missing or damaged."""
        return read_result(self.path)[0]

    def close(self) -> None:
        if self._events is not None:
            # Unwritten events are also in metrics.jsonl, so an error must not hide why the run
            # ends.
            with contextlib.suppress(OSError):
                self._events.close()
            self._events = None
        if self._lock is not None:
            with contextlib.suppress(OSError):  # the disk may be full
                self._lock.close()  # releases the lock
            self._lock = None

    def _remove_folder(self) -> None:
        self._lock.remove()
        self._lock = None
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _clear(self) -> None:
        # A folder that was named by mistake, such as a home folder, may have other checkpoints.
        if not (self.path / "recipe.json").exists():
            others = sorted(p.name for p in self.path.iterdir() if p.name not in locks.NAMES)
            if others:
                raise RunError("run-fresh-elsewhere", path=str(self.path), files=others[:3])
        # recipe.json last: otherwise a failure or a kill could leave checkpoints that a new recipe
        # resumes from.
        for name in ("checkpoints", FOLDER, TRACKED):
            if (self.place / name).exists():
                shutil.rmtree(self.place / name)
        for file in self.place.glob(f"{PREFIX}.out.tfevents.*"):
            file.unlink()
        for file in self.place.glob(KERNELS.replace(".", "-*.")):
            file.unlink()
        for name in NAMES:
            (self.place / name).unlink(missing_ok=True)

    def _agree(self, recipe: dict[str, Any]) -> None:
        file = self.path / "recipe.json"
        if file.exists():
            changes = disagreement(stored_recipe(self.path), recipe)
            if changes:
                longer = [name for name, _, _ in changes] == ["duration"]
                code = "run-of-another-duration" if longer else "run-of-another-recipe"
                raise RunError(code, path=str(self.path), changes=changes)
        else:
            put_inside(self.place / file.name, (json.dumps(recipe, indent=2) + "\n").encode())

    def put_on_disk(self) -> None:
        """Waits until the rows so far are on disk. Called before a checkpoint of a later step gets
        its name, in another thread."""
        self._check_place()
        put_on_disk(*(self.place / name for name in NAMES))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A context that turns an `OSError` into a `RunError`. Also raises `RunError` if the folder
        is no longer where it was: at its path may be somebody else's now."""
        self._check_place()
        try:
            yield
        except OSError as error:
            raise self._error(error) from error
        finally:
            self._check_place()

    def _check_place(self) -> None:
        try:
            to = self._lock.elsewhere()
        except OSError as error:
            raise self._error(error) from error
        if to is not None:
            facts = {"to": to, "checkpoint": newest_checkpoint(Path(to)) if to else None}
            raise RunError("run-moved" if to else "run-gone", path=str(self.path), **facts)

    def _error(self, error: OSError) -> RunError:
        facts = {"path": str(self.path), "checkpoint": newest_checkpoint(self.path)}
        return RunError(
            "run-disk-full" if is_full(error) else "run-unusable", **facts, reason=error
        )


def recorded(recipe: Recipe) -> dict[str, Any]:
    """A recipe as recipe.json has it: its settings, where it comes from, the names and texts of
    its data, the descriptions of its packs, and what was read of a framework's model."""
    known = {"source": recipe.source, "classes": names_in(recipe.task)}
    more = {"texts": recipe.task.known_texts, "read": dict(recipe.task.read)}
    more["readings"] = plain(readings(recipe.task))
    described = packs(recipe.task)
    if len(json.dumps(described)) < _MOST_DESCRIBED:
        more["packs"] = described
    known |= {name: told for name, told in more.items() if told}
    return as_stored({**recipe.describe(), **known})


def points(values: dict[str, float]) -> Any:
    """A TensorBoard summary with a point of each curve."""
    from tensorboardX.proto.summary_pb2 import Summary

    return Summary(
        value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    )


class Events:
    """Writes the event file of the run in `folder`, whose name TensorBoard shows. Writes in the
    caller's thread, because the thread of tensorboardX's `SummaryWriter` prints a traceback if the
    disk is full.

    *Arguments:* `purge`: the step from which values of earlier processes are ignored. All methods
    raise `OSError` when the file cannot be written.
    """

    def __init__(self, folder: Path, purge: int | None = None):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        # The name has the time in seconds, within which another process may start; nor may anybody
        # guess it, since the library would follow a link there.
        self._writer = EventsWriter(str(folder / PREFIX), f".{os.getpid()}.{secrets.token_hex(8)}")
        self._flushed = time.monotonic()
        if purge is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(step=purge, wall_time=time.time(), session_log=start))

    def add(self, step: int, summary: Any) -> None:
        """Adds a summary at `step`."""
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(step=step, wall_time=time.time(), summary=summary))
        if time.monotonic() - self._flushed > _SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        try:
            self._writer.flush()
        finally:  # tensorboardX's `close` leaves the file open if it cannot flush
            self._writer._py_recordio_writer.close()


def _json(value: dict[str, Any], indent: int | None = None) -> str:
    """`value` as lines of JSON, with `null` for NaN and infinities, which JSON lacks."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
