"""Keeps a folder or a file for one process.

The system's own lock ends with its process for any reason, so it is never stale. Some file systems
have none, such as Lustre without `flock` and NFS without its daemon. There a file beside it,
`lock.held`, names the process that has the lock. A lock of a process that has ended on this machine
is taken over. Of one that ended on another machine nobody knows, so a person has to delete it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from filelock import SoftFileLock, Timeout, lock_descriptor, unlock_descriptor

from .errors import RunError
from .files import check_inside, open_inside, read_inside, remove_temporaries

LOCK = "lock"
NAMES = (LOCK, f"{LOCK}.held")
"""The files of a folder's lock."""

_POLL_SECONDS = 0.05
_WITHOUT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
"""What the system says where a file system has no locks."""


class Lock:
    """The lock of the file `path`, until `close` or the end of the process.

    *Arguments:* `waiting`: called before it waits for another process.

    *Fields:* `file`: the open file, for what its holder says of itself.

    Raises `BlockingIOError` with the file that says so while another process has the lock, without
    `waiting`. Raises the errors of `open_inside`.
    """

    def __init__(self, path: Path, waiting: Callable[[], None] | None = None):
        self.path, self._marker = path, SoftFileLock(f"{path}.held", thread_local=False)
        handle = open_inside(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self.file = os.fdopen(handle, "a+b", buffering=0)
        self._held = str(path)
        try:
            if self._taken():
                return
            if waiting is None:
                raise BlockingIOError(errno.EAGAIN, "in use", self._held)
            waiting()
            while not self._taken():
                time.sleep(_POLL_SECONDS)
        except BaseException:
            self.close()
            raise

    def _taken(self) -> bool:
        handle, marker = self.file.fileno(), Path(self._marker.lock_file)
        _remove_stale(marker)
        try:
            taken = lock_descriptor(handle, blocking=False)
        except OSError as error:
            if error.errno not in _WITHOUT:
                raise
            self._held = str(marker)
            try:
                self._marker.acquire(timeout=0)
            except Timeout:
                return False
            return True
        self._held = str(self.path)
        # Its last holder may have removed the file since it was opened
        if not taken or os.fstat(handle).st_nlink == 0:
            return False
        if marker.exists():  # of a host that mounts the file system without locks
            self._held = str(marker)
            unlock_descriptor(handle)
            return False
        return True

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def remove(self) -> None:
        """Removes the file, and releases the lock."""
        if os.name == "nt":  # which removes no open file
            self.close()
        with contextlib.suppress(OSError):
            self.path.unlink()
        self.close()

    def close(self) -> None:
        try:
            self.file.close()
        finally:
            if self._marker.is_locked:
                self._marker.release()


def _remove_stale(marker: Path) -> None:
    """Removes a file that names a process of this machine which has ended. `filelock` does so too,
    by exchanging two names, which NFS refuses."""
    one_at_a_time = marker.with_name(f"{marker.name}.stale")
    with contextlib.suppress(OSError, ValueError):
        if not marker.exists():
            return
        os.close(os.open(one_at_a_time, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        try:
            process, host, *_ = _told(marker)
            if host == _own_name() and not psutil.pid_exists(int(process)):
                marker.unlink()
        finally:
            one_at_a_time.unlink()


def _told(marker: Path) -> list[str]:
    """The process and the machine that a file names."""
    return read_inside(marker, 1 << 10).decode().splitlines()


def _own_name() -> str:
    """This machine's name as `filelock` writes it: with the container's number in a container."""
    with tempfile.TemporaryDirectory() as folder, SoftFileLock(Path(folder) / LOCK):
        return _told(Path(folder) / LOCK)[1]


def hold(folder: Path, *names: str) -> Lock:
    """The lock of `folder`.

    Checks `names`, which only the lock's holder writes, by `check_inside`, and removes what a
    killed `put_inside` of them left. Raises `RunError` while another process has the lock.
    """
    try:
        lock = Lock(folder / LOCK)
    except BlockingIOError as error:
        text = "{path} is in use by {holder}: wait for it, or name another folder."
        if error.filename.endswith(NAMES[1]):
            text += " If that process has ended, or this is a copy of its folder, delete {held}."
        facts = {"path": str(folder), "holder": _holder(folder), "held": error.filename}
        raise RunError("folder-in-use", text, **facts) from None
    try:
        check_inside(folder, *names, LOCK)
        remove_temporaries(folder, *names)
    except BaseException:
        lock.close()
        raise
    # If the disk is full, writing the folder's files will fail too
    with contextlib.suppress(OSError):
        lock.file.truncate(0)
        lock.file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    return lock


def _holder(folder: Path) -> str:
    # Windows lets nobody else read a locked file
    with contextlib.suppress(OSError), os.fdopen(open_inside(folder / LOCK), "rb") as file:
        return file.read(200).decode(errors="replace").strip() or "another process"
    return "another process"


@contextlib.contextmanager
def room_beside(file: Path) -> Iterator[Path]:
    """An empty folder beside `file`, in which it is made. Deleted at the end, together with what
    killed processes left in such a folder. Raises `RunError` while another process makes `file`."""
    beside = file.parent / f".{file.name}.making"  # not .partial, which is a pack's
    check_inside(file.parent, beside.name)
    beside.mkdir(parents=True, exist_ok=True)
    with hold(beside) as lock:
        try:
            yield Path(tempfile.mkdtemp(dir=beside))
        finally:
            for left in set(beside.iterdir()) - {beside / name for name in NAMES}:
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left)
                else:
                    left.unlink()
            lock.remove()
            with contextlib.suppress(OSError):  # of another process, which begins
                beside.rmdir()
