"""`Sending` sends the rows of a run to a service, each number, text and picture of each step once.

`RUN/tracked/DESTINATION/sent.json` has the service's own id of the run, and the last step that was
sent for each number. So a run that was resumed, or whose tracker failed, resumes in the same
curves. Rows that a resumed run writes again are not sent again: they have the same bits.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from ...base import RunError
from ...base.ending import end_group
from ...base.figures import without_secrets
from ...base.files import check_inside, put_inside, read_inside
from ...base.json_types import typed
from ...base.locks import hold
from ...run.folder.media import medium_of
from ...run.folder.run_reader import number, read_media, read_rows, read_run, stored_recipe
from ...run.tracking import END_SECONDS, TRACKED, place, usable_destination
from ..row import flat
from .services import BEGIN, Tracker

_SHARE = 0.02  # of a processor at most, to read a long run's rows again and again


@dataclass
class Sent:
    """The state of a run at a service."""

    id: str | None = None
    """The run's id there."""
    how: str | None = None
    """How the run ended, if the service knows."""
    steps: dict[str, int] = field(default_factory=dict)
    """The last step sent for each number."""
    media: dict[str, int] = field(default_factory=dict)
    """The last step sent for the texts and pictures of each name."""


class Sending:
    """Sends a run folder to a destination such as "mlflow:experiment". Locks the destination until
    `close`, so that no other process sends there.

    *Fields:* `sent` is the state at the service. `rows` is the number of rows, texts and pictures
    that this process sent.

    Raises `RunError` if the folder has no run, if another process sends it, or if `sent.json` is
    damaged. Raises `RecipeError` as `usable_destination` does.
    """

    def __init__(self, run: Path, to: str):
        service, self._name = usable_destination(to)
        stored_recipe(run)  # or there is no run
        check_inside(run, TRACKED)
        self.run = run
        self._file = place(run, to) / "sent.json"
        self._begin = BEGIN[service]
        lock = hold(self._file.parent, "sent.json")
        self.close = lock.close
        self._check = lock.check
        self.sent = Sent()
        self.rows = 0
        self._tracker = None
        try:
            with contextlib.suppress(FileNotFoundError):
                self.sent = typed(Sent, json.loads(read_inside(self._file)))
        except OSError as error:
            self.close()
            raise RunError("file-unreadable", path=str(self._file), reason=error) from error
        except (ValueError, RecursionError) as error:
            self.close()
            text = "{path} is damaged ({reason}): move it away, and all rows are sent to a new run."
            raise RunError("sent-damaged", text, path=str(self._file), reason=str(error)) from None

    _tracker: Tracker | None

    def send(self) -> None:
        """Sends the new rows."""
        for row in read_rows(self.run)[0]:
            step = row.pop("step")
            steps = self.sent.steps
            new = (name for name in row if step > steps.get(name, -1))
            if values := {name: value for name in new if (value := number(row[name])) is not None}:
                self._begun().row(step, values)
                self.sent.steps |= dict.fromkeys(values, step)
                self.rows += 1
                self._save()
        for row in read_media(self.run):
            kind = "text" if "text" in row else "picture"
            name = row["name"]
            step = row["step"]
            if (
                step > self.sent.media.get(f"{kind} {name}", -1)
                and (medium := medium_of(row)) is not None
            ):
                getattr(self._begun(), kind)(step, name, medium)
                self.sent.media[f"{kind} {name}"] = step
                self.rows += 1
                self._save()

    def end(self, over: bool = False) -> None:
        """Sends the rest, and reports to the service how the run ended, unless it knows.

        *Arguments:* `over`: the run's process ends now, and no longer trains.
        """
        self.send()
        run = read_run(self.run)
        how = "finished"
        summary = dict((run.result or {}).get("metrics") or {})
        if run.result is None:
            last = run.processes[-1] if run.processes else {}
            going = "running" if run.running and not over else "killed"
            how = "stopped" if last.get("how") == "done" else str(last.get("how") or going)
        elif "fingerprint" in run.result:
            summary["fingerprint"] = run.result["fingerprint"]
        if self.sent.steps and (self._tracker is not None or how != self.sent.how):
            failed = how in ("diverged", "failed", "killed")
            self._begun().end(
                failed, {"how": how, **{n: v for n, v in summary.items() if v is not None}}
            )
            self._tracker = None
            self.sent.how = how
            self._save()

    def _begun(self) -> Tracker:
        if self._tracker is None:
            run = read_run(self.run)
            start = run.starts[-1] if run.starts else {}
            settings = {
                **{name: value for name, value in run.recipe.items() if name != "packs"},
                **{name: start.get(name) for name in ("devices", "machine", "host")},
            }
            # Of a study, its point's and its seed's
            title = "-".join(self.run.absolute().parts[-2:])
            self._tracker = self._begin(self._name, title, flat(settings), self.sent.id)
            self.sent.id = self._tracker.id
            self._save()
        return self._tracker

    def _save(self) -> None:
        self._check()
        put_inside(self._file, json.dumps(asdict(self.sent)).encode())


class TrackerLog(io.TextIOBase):
    """The output of a process that follows a run, written to `stream`, a file: without passwords of
    addresses, and begun again when it is large, since a service may complain at every row."""

    MOST = 1 << 20

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        handle = self._stream.fileno()
        if os.fstat(handle).st_size > self.MOST:
            os.ftruncate(handle, 0)  # it is opened to append
        self._stream.write(without_secrets(text))
        self._stream.flush()
        return len(text)


def follow(run: Path, to: str) -> None:
    """Sends the rows of a run while it trains, until standard input ends. Then sends the rest.
    Raises what the service raises."""
    if hasattr(os, "nice"):  # not on Windows
        os.nice(10)
    over = threading.Event()
    threading.Thread(target=_end_in_time, args=(over,), daemon=True).start()
    with contextlib.closing(Sending(run, to)) as sending:
        wait = 0.0
        while not over.wait(wait):
            began = time.process_time()
            sending.send()
            wait = max(1.0, (time.process_time() - began) / _SHARE)
        sending.end(over=True)


def _end_in_time(over: threading.Event) -> None:
    """Sets `over` when standard input ends. Kills this process group if it still runs after twice
    `END_SECONDS`, because nobody waits for it."""
    # `sys.stdin` has a lock, which would abort Python at its end
    while os.read(sys.stdin.fileno(), 1 << 16):
        pass
    over.set()
    time.sleep(2 * END_SECONDS)
    end_group(os.getpid())
