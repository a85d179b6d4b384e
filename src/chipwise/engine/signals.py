"""SIGTERM and Ctrl-C as a request to stop at the next step; a second Ctrl-C leaves at once.

On several hosts JAX's runtime takes SIGTERM, tells the others, and finds a step at which all can stop: a
handler of Python's would keep it from that. Ctrl-C on one of them is passed on as SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading

from ..machine.hosts import Hosts, hosts

LEFT_AT_ONCE = 130  # the shell's code for a process ended by Ctrl-C
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it, and leaving at once gives the bar no chance to end
_AGAIN = b"\nstopping after this step; Ctrl-C again leaves at once, without saving\n"


class StopRequest:
    """Listens for the signals from when it is made until `close`; to be asked by `reached` before every step.

    `bool(request)` is true from the first signal on; `name` says which one it was. Outside the main
    thread, which alone gets signals, it listens for nothing. One made while another listens takes its place
    and tells it on closing: who stops a run stops the series of runs around it.
    """

    def __init__(self):
        self.name: str | None = None
        self._hosts: Hosts = hosts()
        self._old: dict[int, object] = {}
        self._interrupts = 0
        heard = (signal.SIGINT,) if self._hosts.count > 1 else (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is threading.main_thread():
            self._old = {n: signal.signal(n, self._handle) for n in heard}

    def __bool__(self) -> bool:
        return self.name is not None

    def reached(self) -> bool:
        """Whether to stop here: on several hosts, where all do."""
        if self._hosts.stopping():
            self.name = self.name or "SIGTERM"
        return self.name is not None

    @property
    def alone(self) -> bool:
        """Whether a signal may end a wait for data: others would wait for this host's part of the step."""
        return self._hosts.count == 1 and self.name is not None

    def close(self) -> None:
        """Gives the signals back to whoever had them."""
        for number, handler in self._old.items():
            # None stands for a handler that was not set from Python, which cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, StopRequest):
                outer.name = outer.name or self.name
        self._old = {}

    def _handle(self, number, frame):
        if number == signal.SIGINT:
            self._interrupts += 1
            again = self._interrupts > 1 or self.name is not None
            # Not with print: the signal may have come in the middle of one.
            os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") if again else _AGAIN)
            if again:
                os._exit(LEFT_AT_ONCE)
            if self._hosts.count > 1:
                os.kill(os.getpid(), signal.SIGTERM)
                return
        self.name = signal.Signals(number).name
