"""`chipwise run-local`: several processes on this machine, each a host of one run."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Annotated

import typer

from ..errors import HostLost, Stopped
from ..machine.cluster import TOLD
from ..machine.hosts import SILENCE_SECONDS
from ..words.facts import fact
from .options import option

_AGAIN = (Stopped.exit_code, HostLost.exit_code)
_GRACE_SECONDS = 10  # beyond the silence, for the others to leave by themselves
_PARENT_DEATH = 1  # prctl's PR_SET_PDEATHSIG


def run_local(
    command: Annotated[list[str], typer.Argument(help="A chipwise command.", metavar="-- COMMAND")],
    processes: Annotated[int, option("How many.", "N", min=1)],
    restart: Annotated[int, option("Restart all up to N times if one is lost.", "N", min=0)] = 0,
) -> None:
    """Run a command in several processes on this machine, as the hosts of one run.

    \b
    Examples:
      chipwise run-local --processes 4 -- train digits --simulate 2
      chipwise run-local --processes 2 --restart 3 -- train mnist --run runs/mnist

    For tests, for CPUs, and for one process a GPU. --restart goes on with a run after one of its processes
    was killed or stopped; Ctrl-C, and SIGTERM to this process, stop all of them, saved.
    """
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: asked.append(n))
    for left in range(restart, -1, -1):
        codes = _run(command, processes, asked)
        code = next((c for c in codes if c not in (0, *_AGAIN)), max(codes))
        lost = any(c < 0 or c in _AGAIN for c in codes)
        if asked or not lost or left == 0:
            break
        typer.echo(str(fact("run-local-again", codes=codes, left=left - 1)), err=True)
    raise typer.Exit(128 - code if code < 0 else code)


def _run(command: list[str], processes: int, asked: list[int]) -> list[int]:
    """The exit codes of `command` in `processes` processes. A signal in `asked` is passed on, once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    for index in range(processes):
        seat = dict(zip(TOLD, (str(processes), str(index), where), strict=True))
        program = [sys.executable, "-c", "from chipwise.cli import main; main()", *command]
        # In a session of its own, so that Ctrl-C comes once, through this process
        one = subprocess.Popen(
            program, env=os.environ | seat, start_new_session=True, preexec_fn=_end_with_parent
        )
        started.append(one)
    passed, ill = False, 0.0
    while any(one.poll() is None for one in started):
        if asked and not passed:
            passed = True
            for one in started:
                one.terminate()
        if not ill and any(one.poll() for one in started):
            ill = time.monotonic()
        if ill and time.monotonic() - ill > SILENCE_SECONDS + _GRACE_SECONDS:
            for one in started:  # frozen, or still waiting for who is gone
                one.kill()
        time.sleep(0.05)
    return [one.returncode for one in started]


def _end_with_parent() -> None:
    """Runs in the new process: it gets SIGTERM when the process that started it is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGTERM)
