"""SIGTERM and Ctrl-C request a stop at the next step; a second Ctrl-C exits at once.

On several hosts, JAX's runtime handles SIGTERM: it tells the other hosts, and chooses a step at which all
stop. A Python handler would replace its own. Ctrl-C on one host is forwarded to it as SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading

from ..errors import Stopped
from ..machine.hosts import SHOW_CURSOR, Hosts, hosts

LEFT_AT_ONCE = 130  # a shell's exit code for Ctrl-C
_AGAIN = b"\nstopping after this step; Ctrl-C again leaves at once, without saving\n"


class StopRequest:
    """Handles the signals from its construction until `close`. Call `reached` before every step.

    `bool(request)` is true after the first signal; `name` is that signal's name. It handles no signals
    outside of the main thread, which alone can. A nested request replaces the outer one and passes its signal
    on when it closes: stopping a run also stops the series of runs that it belongs to.
    """

    def __init__(self):
        self.name: str | None = None
        self._hosts: Hosts = hosts()
        self._old: dict[int, object] = {}
        self._interrupts = 0
        handled = (signal.SIGINT,) if self._hosts.count > 1 else (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is threading.main_thread():
            self._old = {n: signal.signal(n, self._handle) for n in handled}

    def __bool__(self) -> bool:
        return self.name is not None

    def reached(self) -> bool:
        """Whether to stop at this step; on several hosts, all stop at the same step."""
        if self._hosts.stopping():
            self.name = self.name or "SIGTERM"
        return self.name is not None

    @property
    def alone(self) -> bool:
        """Whether a stop was requested on a single host, which ends even a wait for data. On several hosts,
        the others would wait for this host's part of the step."""
        return self._hosts.count == 1 and self.name is not None

    def error(self, step: int, total: int, run: str | None) -> Stopped:
        """The error for a run that stopped after `step` of `total` steps, saved in the folder `run`."""
        about = {} if run is None else {"run": run}
        return Stopped(
            "stopped" if run else "stopped-unsaved", signal=self.name, step=step, total=total, **about
        )

    def close(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._old.items():
            # None is a handler that was not set from Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, StopRequest):
                outer.name = outer.name or self.name
        self._old = {}

    def _handle(self, number, frame):
        if number == signal.SIGINT:
            self._interrupts += 1
            again = self._interrupts > 1 or self.name is not None
            # Not `print`, which the signal may have interrupted.
            os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") if again else _AGAIN)
            if again:
                os._exit(LEFT_AT_ONCE)
            if self._hosts.count > 1:
                os.kill(os.getpid(), signal.SIGTERM)
                return
        self.name = signal.Signals(number).name
