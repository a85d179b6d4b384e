"""Who asks a process to end, and whether it may be ended. A library never ends its host's."""

from __future__ import annotations

import os
import signal
import sys

KILL = getattr(signal, "SIGKILL", 9)
"""The signal that ends a process at once. Windows has no name for it."""

own = False
"""Whether it is the command line's own process, as only the command line itself says."""


def requests() -> list[signal.Signals]:
    """The signals that ask a process to end. Without SIGHUP if it is ignored, as `nohup` does, and
    on Windows, which has none."""
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return [signal.SIGINT, signal.SIGTERM]
    return [signal.SIGINT, signal.SIGTERM, hangup]


def interactive() -> bool:
    """Whether a person has more in this process than a run, which is not to be thrown away."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def end_group(leader: int) -> None:
    """Ends the processes of the group that `leader` leads at once. On Windows, the leader alone."""
    getattr(os, "killpg", os.kill)(leader, KILL)
