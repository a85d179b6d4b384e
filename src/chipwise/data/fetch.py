"""Fetches many files from one filesystem in parallel; each gets its name when it is complete."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import DataError
from ..words.facts import Fact, fact

T = TypeVar("T")

PAUSES = (0.3, 1.0, 3.0, 9.0)  # seconds before trying again
SAY_SECONDS = 10.0


@dataclass(frozen=True)
class File:
    """`name`: relative to the target folder; `remote`: its path on the filesystem; `digest`, if known: an
    algorithm of hashlib, and the hexadecimal digest."""

    name: str
    remote: str
    nbytes: int
    digest: tuple[str, str] | None = None


class Incomplete(EOFError):
    """The number of received bytes differs from the listing."""

    def __init__(self, nbytes: int, expected: int):
        super().__init__()
        self.why = fact("bytes-came", bytes=nbytes, expected=expected)


class Transfer:
    """Fetches `files` to the folder `to`; existing files are kept. Incomplete files are in `parts`.

    `place` is the origin: `place.fs`, an fsspec filesystem for the calling thread, and `place.shown`, for
    messages. Raises `DataError` with the file that could not be fetched, and `OSError` of the disk. Known
    digests are checked when a file is complete; the caller checks that files did not change meanwhile.
    """

    def __init__(self, place: Any, files: Sequence[File], to: Path, parts: Path, say: Callable[[str], None]):
        self.place, self.files, self.to, self.parts, self.say = place, files, to, parts, say
        self.stop = threading.Event()
        self.done = {f for f in files if (to / f.name).is_file() and (to / f.name).stat().st_size == f.nbytes}
        self.came = {f: f.nbytes if f in self.done else 0 for f in files}  # bytes so far
        self.total = sum(f.nbytes for f in files)

    def run(self, workers: int) -> None:
        shutil.rmtree(self.parts, ignore_errors=True)
        self.parts.mkdir(parents=True)
        missing = [f for f in self.files if f not in self.done]
        if missing:
            left = sum(f.nbytes for f in missing)
            self.say(str(fact("fetching", data=self.place.shown, files=len(missing), bytes=left)))
            with ThreadPoolExecutor(workers) as threads:
                try:
                    self._watch([threads.submit(self._file, file, n) for n, file in enumerate(missing)])
                finally:  # also for Ctrl-C: running transfers end, no new ones start
                    self.stop.set()
                    threads.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self.parts)

    def _watch(self, jobs: list[Any]) -> None:
        """Waits for the jobs and reports progress. Raises the error of the first job that failed."""
        began, at_first = time.monotonic(), sum(self.came.values())
        while True:
            ended, going = wait(jobs, timeout=SAY_SECONDS, return_when=FIRST_EXCEPTION)
            for job in ended:
                job.result()
            if not going:
                return
            came = sum(self.came.values())
            speed = (came - at_first) / (time.monotonic() - began)
            left = (self.total - came) / max(speed, 1.0)
            self.say(str(fact("fetched", bytes=came, total=self.total, speed=speed, left=left)))

    def _file(self, file: File, number: int) -> None:
        path = self.parts / str(number)
        try:
            patiently(lambda: self._get(file, path), self.stop)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            here = {"done": len(self.done), "files": len(self.files)}
            raise DataError(
                "fetch-failed", data=self.place.shown, file=file.name, reason=reason(error), **here
            ) from error
        with open(path, "rb") as opened:
            os.fsync(opened)  # or after a power cut the file might lack its contents
            whole = file.digest and hashlib.file_digest(opened, file.digest[0]).hexdigest()
        if file.digest and whole != file.digest[1]:
            raise DataError("fetched-not-as-listed", data=self.place.shown, file=file.name)
        target = self.to / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
        self.done.add(file)

    def _get(self, file: File, path: Path) -> None:
        """Writes a whole file to disk."""
        from fsspec.callbacks import Callback

        def watch(size: int | None, value: int, **_: Any) -> None:
            self.came[file] = value
            if self.stop.is_set():  # a big file may take hours
                raise InterruptedError("stopped")
            if value > file.nbytes:  # or a server that never ends would fill the disk
                raise Incomplete(value, file.nbytes)

        self.place.fs.get_file(file.remote, str(path), callback=Callback(hooks={"watch": watch}))
        self.came[file] = path.stat().st_size
        if self.came[file] != file.nbytes:
            raise Incomplete(self.came[file], file.nbytes)


def patiently(do: Callable[[], T], stop: threading.Event | None = None) -> T:
    """Calls `do()`, and retries after pauses while errors may be temporary, until `stop` is set."""
    stop, silences = stop or threading.Event(), 0
    for pause in PAUSES:
        try:
            return do()
        except Exception as error:  # every filesystem has its own exceptions
            silences += isinstance(error, TimeoutError)  # half a minute each
            if lasting(error) or silences > 1 or stop.wait(pause):
                raise
    return do()


def lasting(error: BaseException) -> bool:
    """Whether a retry cannot help."""
    status = status_of(error)
    if status is not None:
        return 400 <= status < 500 and status not in (408, 425, 429)
    if isinstance(error, FileNotFoundError) and type(error.__cause__).__module__.startswith("aiohttp"):
        return False  # fsspec reports every failure to read a web page as "not found"
    if isinstance(error, (ConnectionError, TimeoutError, EOFError)):
        return False
    if isinstance(error, OSError):
        kinds = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
        return isinstance(error, kinds) or error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, (TypeError, ValueError, AttributeError, NotImplementedError, DataError))


def reason(error: BaseException) -> Fact:
    """The reason in a few words; libraries' own texts are paragraphs of nested exceptions."""
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
    """The HTTP status in an error of aiohttp, or in the cause of an error of fsspec."""
    for one in (error, error.__cause__):
        status = getattr(one, "status", None)
        if isinstance(status, int):
            return status
    return None


def stated_digest(info: Mapping[str, Any]) -> tuple[str, str] | None:
    """The digest of a file that the server states: Google's MD5, Hugging Face's SHA-256 of a large file. S3's
    ETag is not used: for encrypted files and multipart uploads it is not a digest."""
    lfs = info.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, Mapping) else getattr(lfs, "sha256", None)
    if isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256):
        return "sha256", sha256
    with contextlib.suppress(TypeError, ValueError):
        md5 = base64.b64decode(info["md5Hash"], validate=True) if "md5Hash" in info else b""
        return ("md5", md5.hex()) if len(md5) == 16 else None
    return None
