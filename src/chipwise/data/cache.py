"""A disk cache of fetched data with a size limit; the least recently used entries are evicted first.

    CACHE/remote/flowers-5f0c2b71-91ab04ce/flowers       the data, a folder or a file
                                           .entry.json   what they are; its time is that of their last use
                                           .lock         held by every process that uses them
    CACHE/remote/flowers-5f0c2b71-91ab04ce.partial/      being fetched, or left by an interrupted fetch

An entry has its final name only when it is complete. Processes coordinate through file locks, which the
kernel releases when a process ends.
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
from ..words.facts import fact

SHARE = 0.5  # default limit: this share of the free disk plus the cache's size
_PARTIAL = ".partial"
_HELD: dict[Path, IO[str]] = {}  # entries in use by this process, until it ends or releases them


def home() -> Path:
    """The folder for everything that chipwise fetches: CHIPWISE_CACHE, else the user's cache folder."""
    import pooch

    return Path(os.environ.get("CHIPWISE_CACHE") or pooch.os_cache("chipwise")).expanduser().absolute()


def published(name: str, url: str, files: Mapping[str, str]) -> list[Path]:
    """The local paths of `files` (file name to SHA-256) found under `url`, downloaded if not cached.

    `name` is the data set's name in errors. A file appears in the cache only if its checksum is right, so an
    interrupted download leaves no file that looks complete.

    Raises `DataError` without network, for a wrong checksum, and for a cache that cannot be written.
    """
    import pooch
    import requests

    pooch.get_logger().setLevel(logging.WARNING)
    downloader = pooch.HTTPDownloader(timeout=30)
    paths = []
    for file, sha256 in files.items():
        if not (home() / file).exists():
            print(fact("downloading", url=url + file), file=sys.stderr, flush=True)
        try:
            path = pooch.retrieve(url + file, f"sha256:{sha256}", file, home(), downloader=downloader)
        except (requests.RequestException, OSError, ValueError) as error:
            # ValueError is pooch's for a wrong checksum; of no connection requests writes a paragraph
            reason = fact("said", text=" ".join(str(error).split())[:200])
            if isinstance(error, requests.ConnectionError):
                reason = fact("no-connection")
            names = list(files)
            raise DataError(
                "download-failed", data=name, url=url + file, reason=reason, files=names
            ) from error
        paths.append(Path(path))
    return paths


def release(path: Path) -> None:
    """Releases the data at `path` from `remote.local`, so that they may be evicted.

    For programs that use several data sets one after another; data is also released when the process ends.
    """
    lock = _HELD.pop(path.parent, None)
    if lock is not None:
        lock.close()


class Cache:
    """The cache of this user. `limit_bytes`: of all entries together; `None`: CHIPWISE_CACHE_BYTES, else half
    of the free disk plus the cache's size.

    Raises `DataError` for a limit that is not a number. Methods raise `OSError` for errors of the disk.
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
                raise DataError("cache-limit-unknown", value=text)
        self._limit = limit_bytes

    def newest(self, prefix: str) -> Path | None:
        """The most recently used entry whose name begins with `prefix`, now in use by this process."""
        with self._alone():
            entries = [e for e in self.home.glob(f"{glob.escape(prefix)}*") if e.suffix != _PARTIAL]
            return _used(max(entries, key=_last_used)) if entries else None

    @contextlib.contextmanager
    def entry(self, name: str, nbytes: int, data: str, say: Callable[[str], None]) -> Iterator[Path | None]:
        """A context after which the entry `name` is complete and in use by this process.

        It yields the folder for `nbytes`, with the files of an interrupted fetch, or `None` if the entry is
        already complete. It waits while another process fills the entry. After an error the folder stays, so
        that the next fetch continues. Raises `DataError` if there is no room; `data` names the data in it.
        """
        entry, partial, waited = self.home / name, self.home / (name + _PARTIAL), False
        while True:
            with self._alone():
                if entry.is_dir():
                    _used(entry)
                    lock = None
                    break
                lock = _lock(partial, fcntl.LOCK_EX) if partial.is_dir() else None
                if lock is not None or not partial.is_dir():
                    try:
                        self._make_room(partial, nbytes, data)
                    except BaseException:
                        if lock is not None:
                            lock.close()
                        raise
                    partial.mkdir(exist_ok=True)
                    lock = lock or _lock(partial, fcntl.LOCK_EX)
                    (partial / ".entry.json").write_text(json.dumps({"data": data, "bytes": nbytes}))
                    break
            if not waited:
                say(str(fact("fetched-elsewhere", data=data)))
                waited = True
            time.sleep(0.1)
        if lock is None:
            yield None
            return
        try:
            yield partial
            with self._alone():
                os.rename(partial, entry)
                fcntl.flock(lock, fcntl.LOCK_SH)
                _HELD[entry] = lock
        except BaseException:
            lock.close()
            raise

    def _make_room(self, own: Path, nbytes: int, data: str) -> None:
        entries = {e: _planned(e) for e in self.home.iterdir() if e.is_dir() and e != own}
        here, free = _on_disk(own), shutil.disk_usage(self.home).free
        limit = self._limit
        if limit is None:
            limit = SHARE * (free + here + sum(map(_on_disk, entries)))
        numbers = {"data": data, "bytes": nbytes, "limit": limit, "cache": self.home}
        if nbytes > limit:
            raise DataError("cache-too-small", **numbers, try_bytes=nbytes * 1.01)
        for entry in sorted(entries, key=_last_used):
            if sum(entries.values()) + nbytes <= limit and nbytes - here <= free:
                return
            if _evict(entry):
                del entries[entry]
                free = shutil.disk_usage(self.home).free
        used = sum(entries.values())
        if used + nbytes > limit:
            raise DataError("cache-in-use", **numbers, used=used, try_bytes=(used + nbytes) * 1.01)
        if nbytes - here > free:
            raise DataError("cache-disk-full", data=data, bytes=nbytes - here, free=free, cache=self.home)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A lock for one thread of one process: to read, evict or rename entries."""
        with open(self.home / ".lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _used(entry: Path) -> Path:
    """Marks a complete entry as in use by this process; called inside `_alone`."""
    now = time.time_ns()  # the filesystem's clock may be coarse
    os.utime(entry / ".entry.json", ns=(now, now))
    if entry not in _HELD:
        lock = _lock(entry, fcntl.LOCK_SH)
        assert lock is not None  # an exclusive lock on an entry is only taken inside `_alone`
        _HELD[entry] = lock
    return entry


def _lock(entry: Path, kind: int) -> IO[str] | None:
    lock = open(entry / ".lock", "a")  # noqa: SIM115 (held by the caller)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _evict(entry: Path) -> bool:
    """Removes an entry that no process uses. It is renamed to partial first, in case of a kill."""
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
    """The bytes of an entry when it is complete."""
    try:
        return int(json.loads((entry / ".entry.json").read_text())["bytes"])
    except (FileNotFoundError, ValueError, KeyError):  # its making or its removal was killed
        return _on_disk(entry)


def _on_disk(entry: Path) -> int:
    files = (os.path.join(folder, name) for folder, _, names in os.walk(entry) for name in names)
    return sum(os.lstat(file).st_blocks * 512 for file in files)
