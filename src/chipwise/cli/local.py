"""`chipwise --processes N --restart N COMMAND`: runs several processes on this machine, each a host
of one run, or one process, and resumes after a loss."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time

import typer

from ..base import HostLost, Stopped, Stuck, ending, fact
from ..machine.cluster import TOKEN, TOLD
from ..machine.hosts import SILENCE_SECONDS

_AGAIN = (Stopped.exit_code, HostLost.exit_code, Stuck.exit_code)
_GRACE_SECONDS = 10  # after the silence, in which the other processes may end by themselves
_PARENT_DEATH = 1  # prctl's PR_SET_PDEATHSIG


def run_local(
    command: list[str], processes: int | None, restart: int, rejoin: bool = False
) -> None:
    """Runs a command in several processes, as the hosts of one run, and exits with their code. With
    `processes` None, runs it in one process, whose place among the hosts the environment or the
    command gives.

    For tests, for CPUs, and for one process per GPU. With `restart`, resumes up to that many
    times after one of its processes was killed, stopped or stuck. It resumes with those that are
    left. A killed one sits out until the next restart, or, with `rejoin`, begins again at once.
    Ctrl-C, or SIGTERM or SIGHUP to this process, stops all of them after saving.
    """
    signals: list[int] = []
    for number in ending.requests():
        signal.signal(number, lambda n, _: signals.append(n))
    count = processes
    for left in range(restart, -1, -1):
        codes = _run(command, count, signals)
        code = next((c for c in codes if c not in (0, *_AGAIN)), max(codes))
        lost = any(c < 0 or c in _AGAIN for c in codes)
        if signals or not lost or left == 0:
            break
        killed = 0 if rejoin else sum(c < 0 for c in codes)
        count = processes and ((processes - killed) or processes)
        typer.echo(
            str(fact("run-local-again", codes=codes, count=count or 1, left=left - 1)), err=True
        )
    raise typer.Exit(128 - code if code < 0 else code)


def _run(command: list[str], processes: int | None, signals: list[int]) -> list[int]:
    """The exit codes of `command` in `processes` processes. A signal in `signals` terminates them
    all, once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    token = secrets.token_hex(16)
    for index in range(processes or 1):
        told = (str(processes), str(index), coordinator, token)
        seat = dict(zip((*TOLD, TOKEN), told, strict=True)) if processes else {}
        begin = (
            f"from chipwise.cli import local, main; local.end_with_parent({os.getpid()}); main()"
        )
        program = [sys.executable, "-P", "-c", begin, *command]  # nothing of the current folder
        # In its own session, so that it gets Ctrl-C only once, from this process
        started.append(subprocess.Popen(program, env=os.environ | seat, start_new_session=True))
    terminated = False
    failed_at = 0.0
    while any(process.poll() is None for process in started):
        if signals and not terminated:
            terminated = True
            for process in started:
                process.terminate()
        if not failed_at and any(process.poll() for process in started):
            failed_at = time.monotonic()
        if failed_at and time.monotonic() - failed_at > SILENCE_SECONDS + _GRACE_SECONDS:
            for process in started:  # suspended, or still waiting for a lost one
                process.kill()
        time.sleep(0.05)
    return [process.returncode for process in started]


def end_with_parent(parent: int) -> None:
    """Ends the new process when its parent, of the process id `parent`, is killed. It is called
    first in the new process. SIGTERM comes at once (Linux). SIGKILL comes later, if SIGTERM does
    not end it, since JAX keeps SIGTERM from code that takes no steps."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGTERM)
    if os.getppid() != parent:  # it was killed before
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=_follow, args=[parent], daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(SILENCE_SECONDS + _GRACE_SECONDS)
    os.kill(os.getpid(), ending.KILL)
