"""Who works in a folder: one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import BinaryIO

from ..errors import RunError


def hold(folder: Path) -> BinaryIO:
    """The open lock file of `folder`, which is held until it is closed or the process ends.

    Raises `RunError` while another process holds it.
    """
    lock = open(folder / "lock", "a+b", buffering=0)  # noqa: SIM115 (held for the run's life)
    try:
        # The kernel releases it when the process ends, however it ends: no stale locks.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().decode(errors="replace").strip() or "another process"
        lock.close()
        raise RunError(
            f"{folder} is in use by {holder}: wait for it, or name another folder with --run."
        ) from None
    with contextlib.suppress(OSError):  # a full disk, of which the folder's own files will speak
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    return lock
