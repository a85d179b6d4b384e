"""`Tracking`: processes beside a run send its rows to other services, each
`chipwise track --follow`.

The process that trains imports no tracker and does nothing at a row: the others read metrics.jsonl.
So a service that fails, hangs, or fills its disk changes no bit and no speed. The rows that it
lacks are sent later.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from ..base import RecipeError, fact, invalid
from ..base.ending import end_group
from ..base.files import open_inside
from .progress import Reporter

SERVICES = ("wandb", "mlflow", "trackio")
TRACKED = "tracked"
"""The folder in a run folder with a folder for each destination."""

END_SECONDS = 30.0
"""How long the end of a run waits for its trackers. This time is part of no speed and of no time of
the result."""

_NAME = re.compile(r"(?!.*\.\.)[\w@./ -]{1,100}")


def destination(to: str) -> tuple[str, str]:
    """The service and the name in `to`, "wandb:project". Raises `RecipeError` for another."""
    service, _, name = to.partition(":") if isinstance(to, str) else ("", "", "")
    if service not in SERVICES or not _NAME.fullmatch(name):
        expected = (
            "wandb:PROJECT, mlflow:EXPERIMENT or trackio:PROJECT, of letters, digits and -_./@"
        )
        raise invalid("track-destination", "track", to, expected)
    return service, name


def usable_destination(to: str) -> tuple[str, str]:
    """The result of `destination`. Also raises `RecipeError` if the service's library is not
    installed."""
    service, name = destination(to)
    if importlib.util.find_spec(service) is None:
        text = "{service} is not installed: pip install 'chipwise[{service}]'"
        raise RecipeError("tracker-missing", text, service=service)
    return service, name


def place(run: Path, to: str) -> Path:
    """Creates and returns the folder of the destination `to` in the run folder `run`."""
    folder = run / TRACKED / quote(to, safe=" @")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Tracking:
    """A context of a run whose rows go to the destinations `track`, which are checked here. Nothing
    starts before `begin`. At its end it waits a while for what is not yet sent, and warns of what
    was not."""

    def __init__(self, track: str | Sequence[str], run: str | Path | None):
        self._to = [track] if isinstance(track, str) else list(dict.fromkeys(track))
        for to in self._to:
            usable_destination(to)
        if self._to and run is None:
            raise RecipeError(
                "track-nowhere", 'track= needs a folder: cw.fit(recipe, "runs/mine", ...).'
            )
        self._started: dict[str, subprocess.Popen] = {}

    def begin(self, run: Path | None, reporter: Reporter) -> None:
        """Starts a process for each destination, which reads the folder `run`. Starts none on hosts
        without it."""
        if run is None:
            return
        self._run, self._reporter = str(run), reporter
        for to in self._to:
            try:
                self._started[to] = _started(run, to)
            except OSError as error:  # such as a full disk
                self._warn(to, str(error))

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *_: object) -> None:
        end = time.monotonic() + END_SECONDS
        for process in self._started.values():
            process.stdin.close()  # type: ignore[union-attr]  # it sends the rest and ends
        for to, process in self._started.items():
            try:
                code = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                end_group(process.pid)
                code = process.wait()
            if code:
                self._warn(to, f"exit code {code}")

    def _warn(self, to: str, reason: str) -> None:
        command = shlex.join(["chipwise", "track", self._run, "--to", to])
        self._reporter.warn(
            fact("track-failed", to=to, run=self._run, reason=reason, command=command)
        )


def _started(run: Path, to: str) -> subprocess.Popen:
    log = open_inside(place(run, to) / "log.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    command = [sys.executable, "-P", "-m", "chipwise", "track", str(run), "--to", to, "--follow"]
    # Standard input ends when this process does; Ctrl-C is for this one
    with os.fdopen(log, "ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True
        )
