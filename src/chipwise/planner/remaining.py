"""How many programs are left to compile, and how long that may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from .compiled import Request

Progress = Callable[[int, int, str, float | None], None]
"""Called with how many programs are done of how many, what was done last, and the seconds that the rest may
take: `None` as long as not all programs are known."""

TRUSTED = 10.0
"""Seconds of compilation after which `Request.effort` counts as much as this machine's own pace."""


class Remaining:
    """Tells `progress` of the programs that are asked for and done."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._start = 0.0
        self._asked: list[Request] = []
        self._done: list[Request] = []
        self._complete = False

    def ask(self, requests: Iterable[Request]) -> None:
        if not self._asked:
            self._start = time.monotonic()
        self._asked += requests
        self._tell()

    def complete(self) -> None:
        """No more programs will be asked for."""
        self._complete = True
        self._tell()

    def done(self, request: Request) -> None:
        self._done.append(request)
        self._tell(request.name)

    def _tell(self, name: str = "") -> None:
        if self._progress is not None and self._asked:
            self._progress(len(self._done), len(self._asked), name, self._left())

    def _left(self) -> float | None:
        if not self._complete:
            return None
        done = sum(request.effort for request in self._done)
        left = sum(request.effort for request in self._asked if request not in self._done)
        return left * (TRUSTED + time.monotonic() - self._start) / (TRUSTED + done)
