"""Fetched data on disk, under a size limit: what was used longest ago makes room for what comes.

    CACHE/remote/flowers-5f0c2b71-91ab04ce/flowers       the data, a folder or a file
                                           .entry.json   what they are; its time is that of their last use
                                           .lock         held by every process that uses them
    CACHE/remote/flowers-5f0c2b71-91ab04ce.partial/      being fetched, or left by an interrupted fetch

An entry bears its name only when it is complete. Processes agree through locks on files, which the kernel
releases when a process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from ..errors import DataError
from ..words.figures import byte_size

SHARE = 0.5  # of the free disk, with what the cache has already: the limit when none is given
_PARTIAL = ".partial"
_HELD: dict[Path, IO[str]] = {}  # entries in use by this process, until it ends or releases them


def home() -> Path:
    """The folder for everything that chipwise fetches: CHIPWISE_CACHE, else the user's cache folder."""
    import pooch

    return Path(os.environ.get("CHIPWISE_CACHE") or pooch.os_cache("chipwise")).expanduser().absolute()


def published(name: str, url: str, files: Mapping[str, str]) -> list[Path]:
    """The local paths of `files` (file name to SHA-256) found under `url`, downloaded if not cached.

    `name` is how errors call the data set. A file appears in the cache only when its checksum is right, so an
    interrupted download leaves nothing behind that looks whole.

    Raises `DataError` without network, for a wrong checksum, and for a cache that cannot be written.
    """
    import pooch
    import requests

    pooch.get_logger().setLevel(logging.WARNING)  # its lines come after the fact
    downloader = pooch.HTTPDownloader(timeout=30)
    paths = []
    for file, sha256 in files.items():
        if not (home() / file).exists():
            print(f"Fetching {url}{file}", file=sys.stderr, flush=True)
        try:
            path = pooch.retrieve(url + file, f"sha256:{sha256}", file, home(), downloader=downloader)
        except (requests.RequestException, OSError, ValueError) as error:
            # ValueError is pooch's for a wrong checksum; of no connection requests writes a paragraph
            broken = isinstance(error, requests.ConnectionError)
            reason = "no connection" if broken else " ".join(str(error).split())[:200]
            names = list(files)
            raise DataError(
                "download-failed", data=name, url=url + file, reason=reason, files=names
            ) from error
        paths.append(Path(path))
    return paths


def release(path: Path) -> None:
    """Says that this process no longer uses the data at `path`, given by `remote.local`: they may make room.

    For a program that goes from one data set to the next; what has ended releases its data anyway.
    """
    lock = _HELD.pop(path.parent, None)
    if lock is not None:
        lock.close()


class Cache:
    """The cache of this user. `limit_bytes`: of data, all entries together; `None`: CHIPWISE_CACHE_BYTES,
    else half of what the disk has free and the cache has taken.

    Raises `DataError` for a limit that is no number. Methods raise `OSError` where the disk does.
    """

    def __init__(self, limit_bytes: float | None = None):
        self.home = home() / "remote"
        self.home.mkdir(parents=True, exist_ok=True)
        text = os.environ.get("CHIPWISE_CACHE_BYTES")
        if limit_bytes is None and text:
            try:
                limit_bytes = float(text)
            except ValueError:
                limit_bytes = -1
            if not 0 <= limit_bytes < float("inf"):
                raise DataError(f"CHIPWISE_CACHE_BYTES={text}: expected a number of bytes such as 200e9.")
        self._limit = limit_bytes

    def use(self, name: str) -> Path | None:
        """The complete entry `name`, in use by this process from now on; `None` when there is none."""
        with self._alone():
            return self._use(self.home / name)

    def newest(self, prefix: str) -> Path | None:
        """As `use`, of the entry last used among those whose names begin with `prefix`."""
        with self._alone():
            found = [e for e in self.home.glob(f"{glob.escape(prefix)}*") if e.suffix != _PARTIAL]
            return self._use(max(found, key=_last_used)) if found else None

    @contextlib.contextmanager
    def filling(self, name: str, nbytes: int, what: str, say: Callable[[str], None]) -> Iterator[Path | None]:
        """A context with the folder to put `nbytes` into, which becomes the entry `name` at its end.

        It holds what an interrupted fetch has left. When another process is at it, waits, and gives `None` if
        that one completed the entry. After an error inside the folder stays, for the next to go on.

        Raises `DataError` when there is no room and nothing to evict; `what` names the data in it.
        """
        lock = self._claim(name, nbytes, what, say)
        if lock is None:
            yield None
            return
        partial, entry = self.home / (name + _PARTIAL), self.home / name
        try:
            yield partial
            with self._alone():
                os.rename(partial, entry)
                fcntl.flock(lock, fcntl.LOCK_SH)
                _HELD[entry] = lock
        except BaseException:
            lock.close()
            raise

    def _claim(self, name: str, nbytes: int, what: str, say: Callable[[str], None]) -> IO[str] | None:
        partial, told = self.home / (name + _PARTIAL), False
        while True:
            with self._alone():
                if (self.home / name).is_dir():
                    return None
                lock = _lock(partial, fcntl.LOCK_EX) if partial.is_dir() else None
                if lock is not None or not partial.is_dir():
                    try:
                        self._make_room(partial, nbytes, what)
                        partial.mkdir(exist_ok=True)
                        lock = lock or _lock(partial, fcntl.LOCK_EX)
                        (partial / ".entry.json").write_text(json.dumps({"data": what, "bytes": nbytes}))
                    except BaseException:
                        if lock is not None:
                            lock.close()
                        raise
                    return lock
            if not told:
                say(f"Another process is fetching {what}: waiting for it")
                told = True
            time.sleep(0.1)

    def _make_room(self, own: Path, nbytes: int, what: str) -> None:
        entries = {e: _planned(e) for e in self.home.iterdir() if e.is_dir() and e != own}
        here = _on_disk(own)
        free = shutil.disk_usage(self.home).free
        limit = self._limit
        if limit is None:
            limit = SHARE * (free + here + sum(map(_on_disk, entries)))
        if nbytes > limit:
            raise DataError(
                f"{what} has {byte_size(nbytes)}, more than the {byte_size(limit)} that the cache "
                f"{self.home} may hold: set CHIPWISE_CACHE_BYTES={nbytes * 1.01:.3g}, or CHIPWISE_CACHE "
                f"to a folder on a larger disk."
            )
        for entry in sorted(entries, key=_last_used):
            if sum(entries.values()) + nbytes <= limit and nbytes - here <= free:
                return
            if _evict(entry):
                del entries[entry]
                free = shutil.disk_usage(self.home).free
        if sum(entries.values()) + nbytes > limit:
            raise DataError(
                f"{what} has {byte_size(nbytes)}, the cache {self.home} may hold {byte_size(limit)}, and "
                f"{byte_size(sum(entries.values()))} of it are in use by running processes: wait for them, "
                f"or set CHIPWISE_CACHE_BYTES={(sum(entries.values()) + nbytes) * 1.01:.3g}."
            )
        if nbytes - here > free:
            raise DataError(
                f"{what} needs {byte_size(nbytes - here)} and the disk of {self.home} has {byte_size(free)} "
                f"free: make room, or set CHIPWISE_CACHE to a folder on a larger disk."
            )

    def _use(self, entry: Path) -> Path | None:
        if not entry.is_dir():
            return None
        now = time.time_ns()  # the filesystem's own clock may stand still for milliseconds
        os.utime(entry / ".entry.json", ns=(now, now))
        if entry not in _HELD:
            lock = _lock(entry, fcntl.LOCK_SH)
            assert lock is not None  # an exclusive lock on an entry is only taken inside `_alone`
            _HELD[entry] = lock
        return entry

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread of one process at a time: to look at entries, evict some, or rename one."""
        with open(self.home / ".lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _lock(entry: Path, kind: int) -> IO[str] | None:
    lock = open(entry / ".lock", "a")  # noqa: SIM115 (held by the caller)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except BaseException:
        lock.close()
        raise
    return lock


def _evict(entry: Path) -> bool:
    """Removes an entry that no process uses. It is partial from the first step on: a kill leaves no other."""
    lock = _lock(entry, fcntl.LOCK_EX)
    if lock is None:
        return False
    with lock:
        partial = entry.with_name(entry.name.removesuffix(_PARTIAL) + _PARTIAL)
        os.rename(entry, partial)
        shutil.rmtree(partial)
    return True


def _last_used(entry: Path) -> float:
    try:
        return (entry / ".entry.json").stat().st_mtime_ns
    except FileNotFoundError:  # its making or its removal was killed: first to go
        return 0


def _planned(entry: Path) -> int:
    """Bytes of an entry when it is complete."""
    try:
        return int(json.loads((entry / ".entry.json").read_text())["bytes"])
    except (FileNotFoundError, ValueError, KeyError):  # its making or its removal was killed
        return _on_disk(entry)


def _on_disk(entry: Path) -> int:
    return sum(
        os.lstat(os.path.join(folder, name)).st_blocks * 512
        for folder, _, names in os.walk(entry)
        for name in names
    )
