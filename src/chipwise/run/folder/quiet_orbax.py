"""Suppresses what Orbax logs and prints beside the errors that it raises."""

from __future__ import annotations

import logging
import sys
from typing import Any


class QuietOrbax:
    """Keeps Orbax from logging, and tensorstore's threads from printing their own tracebacks.

    Orbax logs every save at WARNING, and every damaged file at ERROR, which `restore` reports
    itself.

    Orbax writes arrays concurrently in an event loop. When one fails, its error is raised and the
    loop is closed while other operations run. Each of these then reports the closed loop, some of
    them only after the checkpoints are closed. After a failure (`expected`), these reports are
    suppressed.
    """

    def __init__(self) -> None:
        self.expected = False
        logging.getLogger("absl").addFilter(self._log)
        self._before = sys.unraisablehook
        sys.unraisablehook = self._hook

    def _hook(self, event: Any) -> None:
        closed = (
            isinstance(event.exc_value, RuntimeError)
            and str(event.exc_value) == "Event loop is closed"
        )
        if not closed:
            self._before(event)

    def _log(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.CRITICAL

    def close(self) -> None:
        logging.getLogger("absl").removeFilter(self._log)
        if sys.unraisablehook == self._hook and not self.expected:
            sys.unraisablehook = self._before
