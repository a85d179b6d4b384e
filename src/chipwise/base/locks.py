"""Keeps a folder or a file for one process.

A process writes only below the folder that it locked. Somebody may move that folder meanwhile, and
another process may begin at its path. So files are written at `Lock.folder`, which Linux follows to
the folder wherever it is, and `Lock.check` says that it was moved.

The system's own lock ends with its process for any reason, so it is never stale. Some file systems
have none, such as Lustre without `flock` and NFS without its daemon. There a file beside it,
`lock.held`, names the process that has the lock. A lock of a process that has ended on this machine
is taken over. Of one that ended on another machine nobody knows, so a person has to delete it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from filelock import SoftFileLock, Timeout, lock_descriptor, unlock_descriptor

from .errors import RunError
from .files import (
    DIRECTORY,
    check_inside,
    fsync_folder,
    open_inside,
    put_on_disk,
    read_inside,
    remove_temporaries,
)

LOCK = "lock"
NAMES = (LOCK, f"{LOCK}.held")
"""The files of a folder's lock."""

_POLL_SECONDS = 0.05
_WITHOUT = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
"""What the system says where a file system has no locks."""


class FolderHandle:
    """An open folder, until `close`.

    *Fields:* `path`: on Linux, a path that stays that folder's if it is moved. Raises `OSError`.
    """

    def __init__(self, folder: Path):
        self.path, self._handle = folder, -1
        if hasattr(os, "O_PATH"):
            self._handle = os.open(folder, os.O_PATH | DIRECTORY)
            by_handle = Path(f"/proc/self/fd/{self._handle}")
            self.path = by_handle if by_handle.is_dir() else folder

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1


class Lock:
    """The lock of the file `path`, until `close` or the end of the process.

    *Arguments:* `waiting`: called before it waits for another process.

    *Fields:* `file`: the open file, for what its holder says of itself. `folder`: the folder of the
    file, by `FolderHandle.path`.

    Raises `BlockingIOError` with the file that says so while another process has the lock, without
    `waiting`. Raises the errors of `open_inside`.
    """

    def __init__(self, path: Path, waiting: Callable[[], None] | None = None):
        self.path, self._marker = path, SoftFileLock(f"{path}.held", thread_local=False)
        self._reading, self._opened = threading.Lock(), FolderHandle(path.parent)
        self.folder = self._opened.path
        try:
            self.file = self._open()
        except BaseException:
            self._opened.close()
            raise
        self._held = str(path)
        try:
            if self._taken():
                return
            if waiting is None:
                raise BlockingIOError(errno.EAGAIN, "in use", self._held)
            waiting()
            while not self._taken():
                if os.fstat(self.file.fileno()).st_nlink == 0:  # nobody else will lock this one
                    self.file.close()
                    self.file = self._open()
                time.sleep(_POLL_SECONDS)
        except BaseException:
            self.close()
            raise

    def _open(self) -> Any:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        return os.fdopen(open_inside(self.folder / self.path.name, flags), "a+b", buffering=0)

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
            (self.folder / self.path.name).unlink()
        self.close()

    def close(self) -> None:
        try:
            self.file.close()
        finally:
            self._opened.close()
            if self._marker.is_locked:
                self._marker.release()

    def elsewhere(self) -> str | None:
        """Returns `None` while the file is at its path. Otherwise returns the folder in which it is
        now, and "" if it is gone or the system does not know. Raises `OSError`."""
        own = self.file
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            # By its random line: of a file on a network, the inode says little
            try:
                line, there = self._line(), read_inside(self.path)
            except PermissionError:  # Windows lets nobody read a locked file
                line = there = b""
            same = os.path.samestat(os.fstat(own.fileno()), os.stat(self.path))
            # A full disk has no line
            if line == there and (line or same):
                return None
        now = Path(os.path.realpath(f"/proc/self/fd/{own.fileno()}"))  # on Linux alone
        return str(now.parent) if now.exists() else ""

    def _line(self) -> bytes:
        # Threads share the offset of one open file
        if hasattr(os, "pread"):
            return os.pread(self.file.fileno(), 200, 0)
        with self._reading:
            self.file.seek(0)
            return self.file.read(200)

    def check(self) -> None:
        """Raises `RunError` if the folder is no longer where it was."""
        if (to := self.elsewhere()) is not None:
            text = "{path} was moved to {to}" if to else "{path} was deleted, or taken by another,"
            text += (
                " while this process wrote there. Nothing was written elsewhere. Put it back, and "
                "type the same command again."
            )
            code = "folder-moved" if to else "folder-gone"
            raise RunError(code, text, path=str(self.path.parent), to=to)


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
        remove_temporaries(folder, *names, alone=True)
    except BaseException:
        lock.close()
        raise
    # If the disk is full, writing the folder's files will fail too
    with contextlib.suppress(OSError):
        lock.file.truncate(0)
        who = f"process {os.getpid()} on {socket.gethostname()}"
        lock.file.write(f"{who}\n{secrets.token_hex(8)}\n".encode())
    return lock


def _holder(folder: Path) -> str:
    # Windows lets nobody else read a locked file
    with contextlib.suppress(OSError), os.fdopen(open_inside(folder / LOCK), "rb") as file:
        return file.read(200).decode(errors="replace").partition("\n")[0] or "another process"
    return "another process"


@contextlib.contextmanager
def replaced(path: Path, fresh: bool = True) -> Iterator[Path]:
    """Yields a name at which the file or folder `path` is made. At the end, waits until it is on
    disk, and puts it at `path`, where the old one stays until then. Removes what killed processes
    left.

    Raises `RunError` while another process makes `path`, and `FileExistsError` if there is one,
    unless `fresh`. Raises `OSError` for a device or a pipe, which would be gone.
    """
    beside = path.parent / f".{path.name}.making"  # not .partial, which is a pack's
    check_inside(path.parent, beside.name)
    beside.mkdir(parents=True, exist_ok=True)
    with hold(beside) as lock:
        old = beside / "old"  # from which a killed process did not come back
        if old.exists() and not path.exists():
            old.rename(path)
        try:
            if path.exists() and not fresh:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise OSError(errno.EINVAL, "neither a file nor a folder", str(path))
            made = Path(tempfile.mkdtemp(dir=beside)) / f"whole{path.suffix}"
            yield made
            put_on_disk(made)
            lock.check()
            if path.is_dir() and made.is_dir():
                path.rename(old)
            try:
                made.replace(path)
            except BaseException:
                if old.exists():
                    old.rename(path)
                raise
            fsync_folder(path.parent)
        finally:
            for left in set(lock.folder.iterdir()) - {lock.folder / name for name in NAMES}:
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left)
                else:
                    left.unlink()
            lock.remove()
            with contextlib.suppress(OSError):  # of another process, which begins
                beside.rmdir()
