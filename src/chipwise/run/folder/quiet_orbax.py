"""Suppresses what Orbax logs and prints beside the errors that it raises."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from pathlib import Path
from typing import Any


class QuietOrbax:
    """Keeps Orbax from logging, and tensorstore's threads from printing their own tracebacks.

    Orbax logs every save at WARNING, and every damaged file at ERROR, which `restore` reports
    itself.

    Orbax writes arrays concurrently in an event loop. When one fails, its error is raised and the
    loop is closed while other operations run. Each of these then reports the closed loop, or that
    its folder is gone, some of them only after the checkpoints are closed. After a failure
    (`expected`), these reports are suppressed.
    """

    def __init__(self) -> None:
        self.expected = False
        logging.getLogger("absl").addFilter(self._log)
        self._unraisable, self._uncaught = sys.unraisablehook, threading.excepthook
        sys.unraisablehook, threading.excepthook = self._hook, self._in_thread

    def _hook(self, event: Any) -> None:
        closed = (
            isinstance(event.exc_value, RuntimeError)
            and str(event.exc_value) == "Event loop is closed"
        )
        if not closed:
            self._unraisable(event)

    def _in_thread(self, event: Any) -> None:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(event.exc_traceback)]
        if not (self.expected and any(map(_of_orbax, files))):
            self._uncaught(event)

    def _log(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.CRITICAL or not _of_orbax(record.pathname)

    def close(self) -> None:
        if self.expected:
            return
        logging.getLogger("absl").removeFilter(self._log)
        if sys.unraisablehook == self._hook:
            sys.unraisablehook = self._unraisable
        if threading.excepthook == self._in_thread:
            threading.excepthook = self._uncaught


def _of_orbax(file: str) -> bool:
    return "orbax" in Path(file).parts
