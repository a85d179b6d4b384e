"""Data at a URL: fetched by fsspec into a disk cache with a size limit. `local` returns the path.

    local("s3://bucket/flowers")        a folder, or a packed folder: whatever fsspec supports
    local("https://host/flowers.tar")   a file; of a web server's folders only packed ones

    CACHE/remote/.lock                               held by the one process that is fetching
    CACHE/remote/flowers-5f0c2b71-91ab04ce/flowers   the data; the name appears at the end
    CACHE/remote/flowers-5f0c2b71-91ab04ce.partial/  being fetched, or left by an interrupted fetch

A copy is reused until the files at the URL change: their names, sizes, and ETags or times are part
of its name. Files that change during a fetch would give a mixture of two versions, so files without
a known digest are listed again at the end. A web server lists nothing: the manifests of a packed
folder name every file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from ..base import DataError, fact
from ..base.figures import listed, one_line, without_secrets
from ..base.files import MOST_BYTES, home
from ..base.locks import Lock
from .deadline import TooSlow, in_time
from .manifest import MANIFEST, TOKENIZER, TOKENIZER_CONFIG, manifest_in

T = TypeVar("T")

SHARE = 0.5  # default limit of the cache: this share of the free disk plus the cache's size
WORKERS = 16  # files fetched at once
PAUSES = (0.3, 3.0)  # seconds before a file is asked for again
STALL_SECONDS = 30.0  # without a byte, before a file is asked for again
# After which a server counts as too slow, or a web server's answer that is no file
SILENCE_SECONDS = 12.0
LEAST_BYTES_PER_SECOND = 1 << 10  # of a transfer from then on, on average
SAY_SECONDS = 10.0  # between two lines about progress
MOST_FILES = 2_000_000  # and folders in a listing; ImageNet has 1.3 million files
PROTOCOLS = ("http", "https", "s3", "gs", "hf")
"""Those that are tested. Others of fsspec reach this machine's files, its memory as Python objects,
its programs, or are chains of such."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SQUEEZED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")  # what pathlib makes of one
# Names of a file's version in filesystems: S3, HTTP, Google, Azure, Hugging Face, SFTP, memory
_MARKS = (
    "ETag",
    "etag",
    "md5Hash",
    "blob_id",
    "Last-Modified",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)


def is_url(text: str) -> bool:
    """Whether `local` would fetch `text`."""
    return bool(_SCHEME.match(text)) and not text.lower().startswith("file://")


def fetched_before(url: str) -> bool:
    """Whether the cache has anything of `url`. Connects to nothing."""
    return any((home() / "remote").glob(f"*-{_key(url)}-*"))


def local(path_or_url: str | Path, *, say: Callable[[str], None] | None = None) -> Path:
    """The local path of data that may be at a URL.

    A path, or `file://`, is returned unchanged, except that `~` is expanded. A URL is fetched: a
    folder with all its files (for a packed folder those in its manifests), or a single file.

    All fetched data together have at most CHIPWISE_CACHE_BYTES, else half of the free disk.

    *Arguments:* `say`: a function to call with lines about progress. `None` prints them to standard
    error.

    An interrupted fetch resumes with the missing files. Files that change meanwhile are fetched
    once more. If the URL cannot be read, an earlier copy is used, with a message.

    Raises `DataError` for an unknown or unreachable URL, a missing library, a cache or a disk that
    is full, a transfer that fails again and again, and files that change again and again.
    """
    text = os.fspath(path_or_url)
    if not is_url(text):
        if isinstance(path_or_url, Path) and _SQUEEZED.match(text) and not path_or_url.exists():
            wrong = "{path} was a URL before it became a Path: give it as a string."
            raise DataError("url-made-a-path", wrong, path=text)
        on_disk = text.lower().startswith("file://")
        return Path(unquote(urlsplit(text).path)) if on_disk else Path(text).expanduser()
    url = _Url(text, say or (lambda line: print(line, file=sys.stderr, flush=True)))
    cache = home() / "remote"
    prefix = f"{url.name}-{_key(text)}-"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            try:
                files = url.look()
            except DataError as error:
                copies = [e for e in cache.glob(f"{prefix}*") if e.suffix != ".partial"]
                if not copies or error.code != "url-unreadable" or _gone(error.__cause__):
                    raise
                url.say(str(fact("old-copy-used", url=url.shown, reason=error.facts["reason"])))
                return max(copies, key=lambda entry: entry.stat().st_mtime) / url.name
            entry = cache / (prefix + _version(files))
            if entry.is_dir() or _fetched(url, files, entry):
                return entry / url.name
        raise DataError("changed-while-fetched", url=url.shown)
    except OSError as error:  # errors of the disk; those of the network are handled elsewhere
        folder = str(error.filename or "the cache")
        wrong = "{data} cannot be kept in {folder} ({reason}): make room, or set CHIPWISE_CACHE."
        raise DataError(
            "cache-unwritable", wrong, data=url.shown, folder=folder, reason=error
        ) from error


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch."""

    name: str
    """The path in the cache's entry."""
    remote: str
    """The path on the filesystem."""
    nbytes: int
    sha256: str | None = None
    """The digest, if a manifest states it."""
    version: tuple[str, ...] = ()
    """Marks that change with the file, such as its ETag."""
    beside: bool = False
    """Whether the entry is the same without the file, as that of an earlier version is."""


def _fetched(url: _Url, files: list[RemoteFile], entry: Path) -> bool:
    """Fetches `files` into `entry`, which appears when it is complete. Returns false if they
    changed meanwhile."""
    elsewhere = str(fact("fetched-elsewhere", data=url.shown))
    with Lock(entry.parent / ".lock", lambda: url.say(elsewhere)):
        if entry.is_dir():
            return True
        partial = entry.with_name(f"{entry.name}.partial")
        _make_room(partial, sum(file.nbytes for file in files), url.shown)
        partial.mkdir(exist_ok=True)
        failure = None
        try:
            _fetch(url, files, partial)
        except DataError as error:
            failure = error
        known = all(file.sha256 for file in files)
        if (failure or not known) and _version(url.look()) != _version(files):
            shutil.rmtree(partial)
            return False
        if failure:
            raise failure
        os.rename(partial, entry)
        return True


def _fetch(url: _Url, files: list[RemoteFile], to: Path) -> None:
    """Fetches the missing `files`, several at once. Each gets its name when it is complete and
    checked."""
    missing = [
        f for f in files if not (to / f.name).is_file() or (to / f.name).stat().st_size != f.nbytes
    ]
    total = sum(file.nbytes for file in missing)
    done = 0
    if missing:
        url.say(str(fact("fetching", data=url.shown, files=len(missing), bytes=total)))
    parts = to / ".parts"
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir()

    def get(number: int) -> None:
        file = missing[number]
        part = parts / str(number)
        for pause in (*PAUSES, None):
            try:
                url.download(file, part)
                break
            except Exception as error:  # every filesystem has its own exceptions
                if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if pause is None or _gone(error) or isinstance(error, TooSlow):
                    raise DataError(
                        "fetch-failed", data=url.shown, file=file.name, reason=url.reason(error)
                    ) from error
                time.sleep(pause)
        with open(part, "rb") as opened:
            os.fsync(opened)  # or after a power cut the file might lack its contents
            if file.sha256 and hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                raise DataError("fetched-not-as-listed", data=url.shown, file=file.name)
        (to / file.name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, to / file.name)

    began = said = time.monotonic()
    url.stopped = False
    with ThreadPoolExecutor(WORKERS) as threads:
        try:
            for file, _ in zip(missing, threads.map(get, range(len(missing))), strict=True):
                done = done + file.nbytes
                now = time.monotonic()
                if now - said > SAY_SECONDS:
                    said = now
                    speed = done / (now - began)
                    numbers = {"bytes": done, "total": total, "speed": speed}
                    url.say(str(fact("fetched", left=(total - done) / max(speed, 1.0), **numbers)))
        except BaseException:  # also for Ctrl-C: running transfers end, no new ones start
            url.stopped = True
            threads.shutdown(wait=True, cancel_futures=True)
            raise
    shutil.rmtree(parts)


def _make_room(own: Path, nbytes: int, data: str) -> None:
    """Raises `DataError` unless cache and disk have room. If they do not, first deletes the remains
    of interrupted fetches."""
    limit = None
    if text := os.environ.get("CHIPWISE_CACHE_BYTES"):
        with contextlib.suppress(ValueError):
            limit = float(text)
        if limit is None or not 0 <= limit < float("inf"):
            wrong = "CHIPWISE_CACHE_BYTES={value}: expected a number of bytes such as 200e9."
            raise DataError("cache-limit-unknown", wrong, value=text)
    others = [entry for entry in own.parent.iterdir() if entry.is_dir() and entry != own]
    here = _on_disk(own)
    used = sum(map(_on_disk, others))
    free = shutil.disk_usage(own.parent).free
    most = SHARE * (free + here + used) if limit is None else limit
    if used + nbytes <= most and nbytes - here <= free:
        return
    left = [entry for entry in others if entry.suffix == ".partial"]
    for entry in left:
        shutil.rmtree(entry)
    if left:
        return _make_room(own, nbytes, data)
    raise DataError(
        "cache-full", cache=own.parent, data=data, bytes=nbytes, limit=most, used=used, free=free
    )


def _late(seconds: float, nbytes: int = 0) -> str | None:
    """The reason why a server that has sent `nbytes` in `seconds` is too slow, or `None` if it is
    not."""
    late = seconds > SILENCE_SECONDS and nbytes < seconds * LEAST_BYTES_PER_SECOND
    return f"{nbytes:,} bytes in {seconds:.0f} seconds" if late else None


class _Url:
    """A folder or file at a URL. `shown` is the URL without passwords and signatures, for
    messages."""

    def __init__(self, text: str, say: Callable[[str], None]):
        self.protocol = text.partition("://")[0].lower()
        self.http = self.protocol in ("http", "https")
        self._text = text
        self.say = say
        self.stopped = False
        self.shown = without_secrets(text)
        try:
            place = unquote(urlsplit(text).path) if self.http else text.partition("://")[2]
            self.name = (
                re.sub(r"[^\w.+-]+", "_", place.rstrip("/").rsplit("/", 1)[-1]).lstrip(".")
                or "data"
            )
            if ("::" in text.partition("?")[0] and not self.http) or self.protocol not in PROTOCOLS:
                raise ValueError(f"only {listed(PROTOCOLS)} are supported")
            if not text.partition("://")[2].strip("/"):
                raise ValueError("it names no place")
            self.path = self._open()[1]
        except Exception as error:  # a library or an argument is missing; some connect here
            why = without_secrets(one_line(error, 200))
            wrong = "{url} cannot be used: {reason}. Expected a URL such as s3://bucket/folder."
            raise DataError("url-unusable", wrong, url=self.shown, reason=why) from error
        self.path = self.path.rstrip("/") if "?" not in text else self.path

    @property
    def fs(self) -> Any:
        """The fsspec filesystem: one for all threads if it is thread-safe, else one for each
        thread."""
        return self._open()[0]

    def _open(self) -> tuple[Any, str]:
        import fsspec

        options: dict[str, Any] = {}
        if self.http:
            import aiohttp

            # Its limit of 5 minutes is too short for big files; proxies from the environment
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=STALL_SECONDS)
            client = {"trust_env": True, "timeout": timeout}
            options = {"client_kwargs": client}
        return fsspec.core.url_to_fs(self._text, **options)  # cached by fsspec

    def look(self) -> list[RemoteFile]:
        """The files to fetch. Raises `DataError` if they cannot be listed."""
        self.fs.invalidate_cache()
        if not (self.http and "?" in self.path) and (packed := self._packed()):
            return packed
        if self.http or not self._text.endswith("/"):
            info = self._ask(self.path, self.fs.info)
            if self.http and info.get("mimetype") == "text/html":
                raise DataError("url-is-page", url=self.shown)
            if info["type"] != "directory":
                return [self._file(self.name, info)]
        # Not fsspec's `find` and `walk`, which leave out folders that cannot be read
        files = []
        folders = [self.path]
        for folder in folders:  # which grows
            for info in self._ask(folder, lambda path: self.fs.ls(path, detail=True)):
                path = info["name"].rstrip("/")
                if path.strip("/") == folder.strip("/"):  # an object with the name of a folder
                    continue
                if info["type"] == "directory":
                    folders.append(path)
                    continue
                parts = [
                    part
                    for part in path.removeprefix(self.path).split("/")
                    if part not in ("", ".")
                ]
                self._refuse_outside(parts)
                files.append(self._file("/".join([self.name, *parts]), info))
            if len(files) + len(folders) > MOST_FILES:
                wrong = "{url} lists more than {limit:count file}: give a packed folder or a tar."
                raise DataError("url-lists-too-many", wrong, url=self.shown, limit=MOST_FILES)
        if not files:
            raise DataError("url-empty", url=self.shown)
        return sorted(files, key=lambda file: file.name)

    def _packed(self) -> list[RemoteFile]:
        """The files of a packed folder: its manifests, the files that they name, and the tokenizer
        of text. Empty for other folders."""
        files = []
        beside: tuple[str, ...] = ()
        for split in ("train", "eval"):
            at = f"{split}/{MANIFEST}"
            text = self._if_there(at, self._manifest)
            if text is None or not (manifest := manifest_in(text)):
                continue
            digest = hashlib.sha256(text).hexdigest()
            named: list[dict[str, Any]] = [{"name": MANIFEST, "bytes": len(text), "sha256": digest}]
            try:
                if (manifest.get("settings", {}).get("text") or {}).get("tokenizer"):
                    beside = (TOKENIZER, TOKENIZER_CONFIG)  # which older packs may lack
                named += [file for shard in manifest["shards"] for file in shard["files"].values()]
                for file in named:
                    name = str(file["name"])
                    size = int(file["bytes"])
                    sha256 = str(file["sha256"])
                    self._refuse_outside([name])
                    if size < 0:  # would hide the bytes of another file from the cache's limit
                        raise ValueError(f"{size} bytes")
                    remote = f"{self.path}/{split}/{quote(name) if self.http else name}"
                    files.append(RemoteFile(f"{self.name}/{split}/{name}", remote, size, sha256))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                why = f"{type(error).__name__}: {error}"
                raise DataError(
                    "manifest-damaged", path=f"{self.shown}/{at}", reason=why
                ) from error
        for name in beside:
            if (info := self._if_there(name, self.fs.info)) is not None:
                files.append(replace(self._file(f"{self.name}/{name}", info), beside=True))
        return files

    def _if_there(self, name: str, do: Callable[[str], T]) -> T | None:
        """`do` of the path of the file `name` of a folder, or `None` without it."""
        try:
            return self._ask(f"{self.path}/{name}", do)
        except DataError as error:
            if error.code == "url-unreadable" and _gone(error.__cause__):
                return None
            raise

    def _manifest(self, path: str) -> bytes:
        """The bytes of a manifest. Raises `ValueError` for more than `MOST_BYTES`."""
        text = b""
        with self.fs.open(path, "rb", **({"block_size": 0} if self.http else {})) as file:
            while len(text) <= MOST_BYTES and (piece := file.read(MOST_BYTES + 1 - len(text))):
                text += piece
        if len(text) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES:,} bytes, the most that a manifest may have")
        return text

    def _file(self, name: str, info: Mapping[str, Any]) -> RemoteFile:
        if info.get("size") is None:
            raise DataError("size-untold", url=self.shown, file=name)
        return RemoteFile(
            name,
            info["name"],
            int(info["size"]),
            version=tuple(str(info.get(mark, "")) for mark in _MARKS),
        )

    def download(self, file: RemoteFile, to: Path) -> None:
        """Writes a file to disk. Raises `EOFError` unless it has the listed number of bytes."""
        from fsspec.callbacks import Callback

        came = 0
        slow = False

        def watch(size: int | None, value: int, **_: Any) -> None:
            nonlocal came
            came = value
            # A big file may take hours, and the thread may have been abandoned
            if self.stopped or slow:
                raise InterruptedError("stopped")
            if value > file.nbytes:  # or a server that never ends would fill the disk
                raise EOFError(f"more than {file.nbytes:,} bytes came")

        told = Callback(hooks={"watch": watch})
        try:
            in_time(
                lambda: self.fs.get_file(file.remote, str(to), callback=told),
                lambda seconds: _late(seconds, max(came, to.stat().st_size if to.exists() else 0)),
            )
        except TooSlow:
            slow = True
            raise
        if (came := to.stat().st_size) != file.nbytes:
            raise EOFError(f"{came:,} bytes came, expected {file.nbytes:,}")

    def _ask(self, path: str, do: Callable[[str], T]) -> T:
        """`do(path)`. Raises `DataError` for any error of the filesystem."""
        try:
            # Answers but files are short
            return in_time(lambda: do(path), _late) if self.http else do(path)
        except Exception as error:  # every filesystem has its own exceptions
            where = self.shown.rstrip("/") + path.removeprefix(self.path)
            wrong = (
                "{url} cannot be read: {reason}. Check the address, the network, and your "
                "permission."
            )
            raise DataError(
                "url-unreadable", wrong, url=where, reason=self.reason(error)
            ) from error

    def reason(self, error: BaseException) -> str:
        """The reason of a failure, in one line without secrets."""
        if (status := _status(error)) is not None:
            return f"the server answers {status}"
        if isinstance(error, FileNotFoundError):
            return "not found"
        return without_secrets(f"{type(error).__name__} {one_line(error, 200)}".strip())

    def _refuse_outside(self, parts: list[str]) -> None:
        """Raises `DataError` for a path that leads out of its folder on any system."""
        if not parts or any(part in ("", ".", "..") or {*part} & {*"/\\\0"} for part in parts):
            raise DataError("file-outside", path=self.shown, name="/".join(parts))


def _status(error: BaseException | None) -> int | None:
    """The HTTP status in an error of aiohttp, or in the cause of an error of fsspec."""
    for one in (error, getattr(error, "__cause__", None)):
        if isinstance(status := getattr(one, "status", None), int):
            return status
    return None


def _gone(error: BaseException | None) -> bool:
    """Whether a file is missing or may not be read, so that another attempt cannot help."""
    if (status := _status(error)) is not None:
        return 400 <= status < 500
    if type(getattr(error, "__cause__", None)).__module__.startswith("aiohttp"):
        return False  # fsspec reports every failure to read a web page as "not found"
    # S3 answers "forbidden" for a missing file if the user may not list
    kinds = (
        FileNotFoundError,
        FileExistsError,
        NotADirectoryError,
        PermissionError,
        InterruptedError,
    )
    return isinstance(error, kinds)


def _version(files: list[RemoteFile]) -> str:
    whole = (file for file in files if not file.beside)
    known = [[file.name, file.nbytes, file.sha256, file.version] for file in whole]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:12]


def _key(url: str) -> str:
    return hashlib.sha256(url.rstrip("/").encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _on_disk(entry: Path) -> int:
    files = (os.path.join(folder, name) for folder, _, names in os.walk(entry) for name in names)
    return sum(os.lstat(file).st_blocks * 512 for file in files)
