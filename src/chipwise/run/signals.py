"""SIGTERM, SIGHUP and Ctrl-C request a stop at the next step. A second Ctrl-C leaves at once.

On several hosts, JAX's runtime handles SIGTERM. It informs the other hosts, and chooses a step at
which all stop. A Python handler would replace its own. Other signals to one host are forwarded to
it as SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

from ..base import Stopped, ending
from ..machine.hosts import SHOW_CURSOR, Hosts, hosts

LEFT_AT_ONCE = 130  # a shell's exit code for Ctrl-C
_AGAIN = b"\nstopping after this step; Ctrl-C again leaves at once, without saving\n"


class StopRequest:
    """Handles the signals from its construction until `close`. Call `reached` before every step.

    `bool(request)` is true after the first signal, and `name` is that signal's name. It handles
    signals only in the main thread, since no other thread can. A nested request replaces the outer
    one and passes its signal on when it closes. So stopping a run also stops the series of runs
    that it belongs to.
    """

    def __init__(self):
        self.name: str | None = None
        self._hosts: Hosts = hosts()
        self._old: dict[int, object] = {}
        self._asked = False
        handled = ending.requests()
        if self._hosts.count > 1:
            handled.remove(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread():
            self._old = {n: signal.signal(n, self._handle) for n in handled}

    def __bool__(self) -> bool:
        return self.name is not None

    def ask(self, name: str) -> None:
        """Requests a stop, as the signal `name` does."""
        if self._asked:
            return
        self._asked = True
        if self._hosts.count > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.name = name

    def reached(self, unread: bool = False) -> bool:
        """Whether to stop at this step. On several hosts, all stop at the same step. `unread`:
        whether the reader of the run's output has left, which requests a stop too."""
        if unread:
            self.ask("SIGPIPE")
        if self._hosts.stopping():
            self.name = self.name or "SIGTERM"
        return self.name is not None

    @property
    def alone(self) -> bool:
        """Whether a stop was requested on a single host, which ends even a wait for data. On
        several hosts, the others would wait for this host's part of the step."""
        return self._hosts.count == 1 and self.name is not None

    def error(self, step: int, total: int, run: str | None) -> Stopped:
        """The error for a run that stopped after `step` of `total` steps, saved in the folder
        `run`."""
        about = {} if run is None else {"run": run}
        return Stopped(
            "stopped" if run else "stopped-unsaved",
            signal=self.name,
            step=step,
            total=total,
            **about,
        )

    def close(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._old.items():
            # None is a handler that was not set from Python, and cannot be restored.
            signal.signal(
                number,
                signal.SIG_DFL if handler is None else handler,  # type: ignore[arg-type]
            )
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, StopRequest):
                outer.name = outer.name or self.name
        self._old = {}

    def _handle(self, number, frame):
        if number == signal.SIGINT:
            again = self._asked or self.name is not None
            # Not `print`, which the signal may have interrupted
            with contextlib.suppress(OSError):  # the terminal may be closed
                os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") if again else _AGAIN)
            if again and ending.own:
                os._exit(LEFT_AT_ONCE)
            if again:  # a notebook or another program keeps what else it has
                raise KeyboardInterrupt
        self.ask(signal.Signals(number).name)
