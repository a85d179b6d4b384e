"""Many files from one filesystem at once, big ones in parts, each under its name only when it is whole."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import DataError
from ..words.facts import Fact, fact

T = TypeVar("T")

PART_BYTES = 8 << 20  # what one worker asks for at a time, and keeps in memory
PAUSES = (0.3, 1.0, 3.0, 9.0)  # seconds before trying again
SAY_SECONDS = 10.0


@dataclass(frozen=True)
class File:
    """`name` below the folder it goes to; `remote`, its filesystem's name for it; `sha256` where known."""

    name: str
    remote: str
    nbytes: int
    sha256: str | None = None


class Incomplete(EOFError):
    """Another number of bytes came than was listed."""

    def __init__(self, nbytes: int, expected: int):
        super().__init__()
        self.why = fact("bytes-came", bytes=nbytes, expected=expected)


class Transfer:
    """Brings `files` to the folder `to`; those already there are left. What is not whole: `parts`.

    `place` is where files come from: `place.fs`, its fsspec filesystem for the thread that asks,
    `place.http`, and `place.shown` for messages. Raises `DataError` naming the file that could not be had,
    and `OSError` of the disk. What is known of a file's contents is checked when it is whole; that files did
    not change meanwhile is for the caller.
    """

    def __init__(self, place: Any, files: Sequence[File], to: Path, parts: Path, say: Callable[[str], None]):
        self.place, self.files, self.to, self.parts, self.say = place, files, to, parts, say
        self.stop, self.lock = threading.Event(), threading.Lock()
        self.done = {f for f in files if (to / f.name).is_file() and (to / f.name).stat().st_size == f.nbytes}
        self.bytes = sum(f.nbytes for f in self.done)
        self.total = sum(f.nbytes for f in files)
        self.left: dict[File, int] = {}  # parts of a file that have not come

    def run(self, workers: int) -> None:
        shutil.rmtree(self.parts, ignore_errors=True)
        self.parts.mkdir(parents=True)
        missing = [f for f in self.files if f not in self.done]
        if missing:
            left = self.total - self.bytes
            self.say(str(fact("fetching", data=self.place.shown, files=len(missing), bytes=left)))
            big = [f for f in missing if f.nbytes > PART_BYTES]
            ranges = bool(big) and self._has_ranges(big[0])
            with ThreadPoolExecutor(workers) as threads:
                try:
                    jobs = []
                    for number, file in enumerate(missing):
                        cut = ranges and file.nbytes > PART_BYTES
                        starts = range(0, file.nbytes, PART_BYTES) if cut else (None,)
                        self.left[file] = len(starts)
                        jobs += [threads.submit(self._part, number, file, start) for start in starts]
                    self._watch(jobs)
                finally:  # also for Ctrl-C: what is under way ends, nothing new begins
                    self.stop.set()
                    threads.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self.parts)

    def _watch(self, jobs: list[Any]) -> None:
        """Waits for the jobs and says how far they are. Raises what the first to fail raised."""
        began, at_first = time.monotonic(), self.bytes
        while True:
            ended, going = wait(jobs, timeout=SAY_SECONDS, return_when=FIRST_EXCEPTION)
            for job in ended:
                job.result()
            if not going:
                return
            speed = (self.bytes - at_first) / (time.monotonic() - began)
            left = (self.total - self.bytes) / max(speed, 1.0)
            self.say(str(fact("fetched", bytes=self.bytes, total=self.total, speed=speed, left=left)))

    def _has_ranges(self, file: File) -> bool:
        """A web server may ignore what part was asked for and send all, 16 times over."""
        if not self.place.http:
            return True

        def probe() -> bool:
            with self.place.fs.open(file.remote, size=file.nbytes, block_size=1, cache_type="none") as opened:
                opened.seek(1)
                try:
                    return len(opened.read(1)) == 1
                except ValueError:  # fsspec's for a server that sent all
                    return False

        return self._had(file, probe)

    def _part(self, number: int, file: File, start: int | None) -> None:
        """Part of a file from `start`, or all of it."""
        if self.stop.is_set():
            return
        path = self.parts / str(number)
        if start is None and file.nbytes > PART_BYTES:
            self._had(file, lambda: self._stream(file, path))
        else:
            data = self._had(file, lambda: self._bytes(file, start))
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as opened:
                opened.seek(start or 0)
                opened.write(data)
            self._came(len(data))
        with self.lock:
            self.left[file] -= 1
            last = not self.left[file]
        if last:
            self._whole(file, path)

    def _bytes(self, file: File, start: int | None) -> bytes:
        stop = None if start is None else min(start + PART_BYTES, file.nbytes)
        data = self.place.fs.cat_file(file.remote, start=start, end=stop)
        expected = (stop or file.nbytes) - (start or 0)
        if len(data) != expected:
            raise Incomplete(len(data), expected)
        return data

    def _stream(self, file: File, path: Path) -> None:
        """All of a big file straight to disk."""
        from fsspec.callbacks import Callback

        came = 0

        def watch(size: int | None, value: int, **_: Any) -> None:
            nonlocal came
            self._came(value - came)
            came = value
            if self.stop.is_set():  # a big file may take hours
                raise InterruptedError("stopped")

        try:
            self.place.fs.get_file(file.remote, str(path), callback=Callback(hooks={"watch": watch}))
            if path.stat().st_size != file.nbytes:
                raise Incomplete(path.stat().st_size, file.nbytes)
        except BaseException:
            self._came(-came)
            raise

    def _came(self, nbytes: int) -> None:
        with self.lock:
            self.bytes += nbytes

    def _whole(self, file: File, path: Path) -> None:
        with open(path, "rb") as opened:
            os.fsync(opened)  # or a power cut could leave the name without the bytes
            sha256 = file.sha256 and hashlib.file_digest(opened, "sha256").hexdigest()
        if sha256 != file.sha256:
            raise DataError("fetched-not-as-listed", data=self.place.shown, file=file.name)
        target = self.to / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
        with self.lock:
            self.done.add(file)

    def _had(self, file: File, do: Callable[[], T]) -> T:
        try:
            return patiently(do, self.stop)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            here = {"done": len(self.done), "files": len(self.files)}
            raise DataError(
                "fetch-failed", data=self.place.shown, file=file.name, reason=reason(error), **here
            ) from error


def patiently(do: Callable[[], T], stop: threading.Event | None = None) -> T:
    """`do()`, tried again after pauses while what it raises may pass, and until `stop` is set."""
    stop = stop or threading.Event()
    for pause in PAUSES:
        try:
            return do()
        except Exception as error:  # every filesystem has a tree of its own
            if lasting(error) or stop.wait(pause):
                raise
    return do()


def lasting(error: BaseException) -> bool:
    """Whether trying again will not help."""
    status = status_of(error)
    if status is not None:
        return 400 <= status < 500 and status not in (408, 425, 429)
    if isinstance(error, FileNotFoundError) and type(error.__cause__).__module__.startswith("aiohttp"):
        return False  # fsspec calls every failure to look at a web page "not found"
    if isinstance(error, (ConnectionError, TimeoutError, EOFError)):
        return False
    if isinstance(error, OSError):
        kinds = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
        return isinstance(error, kinds) or error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, (TypeError, ValueError, AttributeError, NotImplementedError))


def reason(error: BaseException) -> Fact:
    """Why, in a few words: libraries' own texts are paragraphs of nested exceptions."""
    status, name = status_of(error), type(error).__name__
    if status is not None:
        return fact("server-answers", status=status)
    if isinstance(error, Incomplete):
        return error.why
    if isinstance(error, TimeoutError):
        return fact("no-answer")
    if isinstance(error, FileNotFoundError):
        return reason(error.__cause__) if error.__cause__ is not None else fact("not-found")
    if ("Connector" in name and "Certificate" not in name) or isinstance(error, ConnectionRefusedError):
        return fact("no-connection")
    if "Payload" in name or "Disconnected" in name or isinstance(error, ConnectionError):
        return fact("connection-broke")
    return fact("said", text=" ".join(str(error).split())[:200] or name)


def status_of(error: BaseException) -> int | None:
    """The web server's answer in an error of aiohttp, or under one of fsspec."""
    for one in (error, error.__cause__):
        status = getattr(one, "status", None)
        if isinstance(status, int):
            return status
    return None
