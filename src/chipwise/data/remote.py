"""Data at a URL: lists it, fetches it in parallel into the disk cache, and returns the local path.

    local("s3://bucket/flowers")        a folder, or a packed folder: s3, gs, https, whatever fsspec supports
    local("https://host/flowers.tar")   a single file

A web server need not list a packed folder, since manifests name every file. Fetched data is reused until the
files at the URL change. Files that change during a fetch would give a mixture of two versions, so files
without a known checksum are listed again at the end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import html
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit

from ..atomic import MOST_BYTES
from ..errors import DataError
from ..words.facts import Fact, fact
from .cache import Cache, home
from .fetch import File, Transfer, lasting, patiently, reason, stated_digest, status_of
from .manifest import MANIFEST, manifest_in

T = TypeVar("T")

SILENCE_SECONDS = 30.0  # seconds of a server's silence before a retry
MOST_FOLDERS_DEEP = 40  # a web server may list a folder inside itself, endlessly
MOST_FILES = 2_000_000  # files, folders and links in a listing; ImageNet has 1.3 million files
LISTING_SECONDS = 7200.0  # after which a server may still list and state sizes
_SPLITS = ("train", "eval")
# Protocols of fsspec that are refused: this machine's files, other Python code, and chains of them
_LOCAL = ("local", "simplecache", "filecache", "blockcache", "reference", "zip", "tar", "data")
_PROTOCOLS = "expected https, s3, gs, az or hf"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SQUEEZED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")  # what pathlib makes of one
# Passes each character a few times at most, whatever the page
_LINK = re.compile(r"""<a\s[^<>]*?\bhref\s*=\s*(?:"([^"<>]*)"|'([^'<>]*)')""", re.IGNORECASE)
# Names of a file's version or digest in filesystems: S3, HTTP, Google, Azure, Hugging Face, SFTP, memory
_MARKS = ("ETag", "etag", "md5Hash", "blob_id", "Last-Modified", "LastModified", "last_modified")
_TIMES = ("mtime", "created")


def local(
    path_or_url: str | Path,
    *,
    limit_bytes: float | None = None,
    workers: int = 16,
    say: Callable[[str], None] | None = None,
) -> Path:
    """The local path of data that may be at a URL.

    A path, or `file://`, is returned unchanged, except that `~` is expanded. A URL is fetched: a folder with
    all its files (for a packed folder those in its manifests), or a single file. The copy is not evicted
    until this process ends or calls `cache.release`.

    *Arguments:*

    - `limit_bytes`: of all fetched data together; `None`: CHIPWISE_CACHE_BYTES, else half of the free disk.
      The cache is CHIPWISE_CACHE, else the user's cache folder.
    - `workers`: files fetched at once.
    - `say`: called with lines about progress; `None`: standard error.

    An interrupted fetch continues with the missing files. Files that change meanwhile are fetched once more.
    Without a connection an earlier copy is used, with a message.

    Raises `DataError` for an unknown or unreachable URL, a missing library, data larger than the limit,
    a full disk, a transfer that fails again and again, and files that change again and again.
    """
    text = os.fspath(path_or_url)
    if not is_url(text):
        if isinstance(path_or_url, Path) and _SQUEEZED.match(text) and not path_or_url.exists():
            raise DataError("url-made-a-path", path=text)
        on_disk = text.lower().startswith("file://")
        return Path(unquote(urlsplit(text).path)) if on_disk else Path(text).expanduser()
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    url = _Url(text, workers)
    try:
        cache = Cache(limit_bytes)
        prefix = f"{url.name}-{_key(text)}-"
        for _ in range(2):
            try:
                return _fetched(url, cache, prefix, say) / url.name
            except _Unreachable as error:
                old = cache.newest(prefix)
                if old is None:
                    raise DataError("unreachable", url=url.shown, reason=error.why) from error
                say(str(fact("old-copy-used", url=url.shown, reason=error.why)))
                return old / url.name
            except _Changed:
                continue
        raise DataError("changed-while-fetched", url=url.shown)
    except OSError as error:  # errors of the disk; those of the network are handled elsewhere
        folder, why = str(error.filename or "the cache"), error.strerror or str(error)
        raise DataError("cache-unwritable", data=url.shown, folder=folder, reason=why) from error


def is_url(text: str) -> bool:
    """Whether `local` would fetch `text`."""
    return bool(_SCHEME.match(text)) and not text.lower().startswith("file://")


def fetched_before(url: str) -> bool:
    """Whether the cache has anything of `url`. Connects to nothing."""
    return any((home() / "remote").glob(f"*-{_key(url)}-*"))


def _key(url: str) -> str:
    return _digest(url.rstrip("/").encode("utf-8", "surrogatepass"))


def _fetched(url: _Url, cache: Cache, prefix: str, say: Callable[[str], None]) -> Path:
    """A complete copy of the current data at `url`."""
    listing = url.look()
    name = prefix + listing.version
    with cache.entry(name, listing.nbytes, url.shown, say) as folder:
        if folder is not None:
            target = folder / url.name
            for file, content in listing.texts.items():
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                (target / file).write_bytes(content)
            to = folder if listing.single else target
            failure = None
            try:
                Transfer(url, listing.files, to, folder / ".parts", say).run(url.workers)
            except DataError as error:
                failure = error
            known = all(file.digest for file in listing.files)
            if (failure or not known) and url.look().version != listing.version:
                shutil.rmtree(folder)
                raise _Changed
            if failure:
                raise failure
    return cache.home / name


@dataclass(frozen=True)
class _Listing:
    files: tuple[File, ...]
    version: str  # changes with the files
    single: bool = False
    texts: dict[str, bytes] = field(default_factory=dict)  # files read already: the manifests

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files) + sum(map(len, self.texts.values()))


class _Changed(Exception):
    """The files at the URL changed during the fetch."""


class _Unreachable(Exception):
    """An error of the network, which may be temporary."""

    def __init__(self, why: Fact):
        super().__init__()
        self.why = why


class _Url:
    """A folder or file at a URL. `shown`: the URL without passwords and signatures, for messages."""

    def __init__(self, text: str, workers: int):
        self.protocol = text.partition("://")[0].lower()
        self.http = self.protocol in ("http", "https")
        self.shown = re.sub(r"//[^/@]*@", "//", text.partition("?")[0] if self.http else text)
        try:
            place = urlsplit(text).path if self.http else text.partition("://")[2]
        except ValueError as error:
            raise DataError("url-malformed", url=self.shown, reason=str(error)) from error
        if ("::" in text.partition("?")[0] and not self.http) or self.protocol in _LOCAL:
            raise DataError("protocol-unknown", url=self.shown, reason=_PROTOCOLS)
        name = unquote(place) if self.http else place
        self.name = re.sub(r"[^\w.+-]+", "_", name.rstrip("/").rsplit("/", 1)[-1]).lstrip(".") or "data"
        self._text, self.workers = text, workers
        self._listed, self._until = 0, float("inf")
        _, self.path = self._open()
        self.path = self.path.rstrip("/") if "?" not in text else self.path

    @property
    def fs(self) -> Any:
        """The fsspec filesystem: one for all threads if it is thread-safe, else one for each thread."""
        return self._open()[0]

    def _open(self) -> tuple[Any, str]:
        import fsspec

        options: dict[str, Any] = {}
        try:
            if self.http:
                import aiohttp

                # Its limit of 5 minutes is too short for big files; proxies from the environment
                timeout = aiohttp.ClientTimeout(total=None, sock_connect=15, sock_read=SILENCE_SECONDS)
                client = {"trust_env": True, "timeout": timeout}
                options = {"simple_links": False, "client_kwargs": client}
            return fsspec.core.url_to_fs(self._text, **options)  # cached by fsspec
        except ImportError as error:
            # fsspec's message names what to install, for the web two packages where one is enough
            why = "pip install aiohttp" if self.http else " ".join(str(error).split())
            raise DataError("library-missing", protocol=self.protocol, reason=why) from error
        except ValueError as error:
            why = " ".join(str(error).split())
            raise DataError("protocol-unknown", url=self.shown, reason=why) from error
        except OSError as error:  # some filesystems connect here
            raise DataError("unreachable", url=self.shown, reason=reason(error)) from error

    def look(self) -> _Listing:
        """Lists the files to fetch. Raises `_Unreachable`, or `DataError` if they cannot be listed."""
        self.fs.invalidate_cache()
        self._listed, self._until = 0, time.monotonic() + LISTING_SECONDS
        packed = {} if self.http and "?" in self.path else self._manifests()
        if packed:
            return self._packed(packed)
        if not self._text.endswith("/"):
            info = self._ask(self.path, lambda: self.fs.info(self.path))
            if info["type"] != "directory" and not (self.http and info.get("mimetype") == "text/html"):
                return self._listing({self.name: info}, single=True)
        infos = self._walk()
        if not infos:
            raise DataError("url-empty-http" if self.http else "url-empty", url=self.shown)
        return self._listing(infos)

    def _manifests(self) -> dict[str, bytes]:
        texts = {}
        for split in _SPLITS:
            path = f"{self.path}/{split}/{MANIFEST}"
            try:
                text = self._ask(path, functools.partial(self._read, path), missing=True)
            except FileNotFoundError:
                if split == _SPLITS[0]:
                    break
                continue
            if manifest_in(text):
                texts[f"{split}/{MANIFEST}"] = text
        return texts

    def _packed(self, texts: dict[str, bytes]) -> _Listing:
        files = []
        for at, text in texts.items():
            folder = PurePosixPath(at).parent
            try:
                for shard in manifest_in(text)["shards"]:
                    for file in shard["files"].values():
                        name = str(file["name"])
                        if _leads_outside(name):
                            raise DataError("file-outside", path=f"{self.shown}/{at}", name=name)
                        remote = f"{self.path}/{folder}/{quote(name) if self.http else name}"
                        size, digest = int(file["bytes"]), ("sha256", str(file["sha256"]))
                        if size < 0:  # would hide the bytes of another file from the cache's limit
                            raise ValueError(f"{size} bytes")
                        files.append(File(f"{folder}/{name}", remote, size, digest))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                why = f"{type(error).__name__}: {error}"
                raise DataError("manifest-damaged", path=f"{self.shown}/{at}", reason=why) from error
        return _Listing(tuple(files), _digest(*texts.values()), texts=texts)

    def _listing(self, infos: dict[str, dict[str, Any]], single: bool = False) -> _Listing:
        files, known = [], []
        for name, info in sorted(infos.items()):
            if info.get("size") is None:
                raise DataError("size-untold", url=self.shown, file=name)
            files.append(File(name, info["name"], int(info["size"]), stated_digest(info)))
            known.append([name, int(info["size"]), *(str(info.get(mark, "")) for mark in (*_MARKS, *_TIMES))])
        return _Listing(tuple(files), _digest(json.dumps(known).encode()), single)

    def _walk(self) -> dict[str, dict[str, Any]]:
        """All files below: name, with `/` on any system, to fsspec's information.

        Not fsspec's `find`, which ignores unreadable folders and lists one at a time.
        """
        files: dict[str, dict[str, Any]] = {}
        with ThreadPoolExecutor(self.workers) as threads, contextlib.ExitStack() as ending:
            ending.callback(threads.shutdown, cancel_futures=True)
            folders = {"": self.path}
            for _ in range(MOST_FOLDERS_DEEP):
                below = {}
                for prefix, infos in zip(folders, threads.map(self._ls, folders.values()), strict=True):
                    for info in infos:
                        name = info["name"].rstrip("/").rsplit("/", 1)[-1]
                        name = unquote(name) if self.http else name
                        if _leads_outside(name):
                            raise DataError("file-outside", path=self.shown, name=name)
                        if info["type"] == "directory":
                            below[f"{prefix}{name}/"] = info["name"].rstrip("/")
                        else:
                            files[prefix + name] = info
                folders = below
                if not folders:
                    break
            else:
                raise DataError("url-endless", url=self.shown, deep=MOST_FOLDERS_DEEP)
            if self.http:  # its listings have only names
                places = [info["name"] for info in files.values()]
                full = threads.map(lambda p: self._ask(p, lambda: self.fs.info(p)), places)
                files = dict(zip(files, full, strict=True))
        return files

    def _ls(self, path: str) -> list[dict[str, Any]]:
        def ask() -> list[dict[str, Any]]:
            self.fs.invalidate_cache(path)  # some filesystems cache their listings
            return self.fs.ls(path, detail=True)

        def links() -> list[dict[str, Any]]:
            # Not fsspec's `ls`, which reads a page of any size. Links are relative to a folder with its slash
            page = self._read(f"{path}/").decode("utf-8", "ignore")
            found = (html.unescape(match[1] or match[2] or "") for match in _LINK.finditer(page))
            inside = dict.fromkeys(place for link in found if (place := _inside(link, path)))
            return [{"name": p, "type": "directory" if p.endswith("/") else "file"} for p in inside]

        infos = self._ask(path, links if self.http else ask)
        self._listed += len(infos)
        if self._listed > MOST_FILES:
            raise DataError("url-lists-too-many", url=self.shown, limit=MOST_FILES)
        # Object stores may have an empty object with the name of a folder
        return [i for i in infos if self.http or i["name"].strip("/") != path.strip("/")]

    def _read(self, path: str) -> bytes:
        """A manifest or a web page. Raises `DataError` if it has more than `MOST_BYTES`."""
        from fsspec.callbacks import Callback

        def watch(size: int | None, value: int, **_: Any) -> None:
            if value > MOST_BYTES:
                raise DataError("answer-too-large", url=self._where(path), limit=MOST_BYTES)
            self._in_time()

        if self.http:
            content = io.BytesIO()
            self.fs.get_file(path, content, callback=Callback(hooks={"watch": watch}))
            return content.getvalue()
        text = self.fs.cat_file(path, start=0, end=MOST_BYTES + 1)
        watch(None, len(text))
        return text

    def _where(self, path: str) -> str:
        return self.shown.rstrip("/") + path.removeprefix(self.path)

    def _in_time(self) -> None:
        if time.monotonic() > self._until:
            raise DataError("url-lists-too-long", url=self.shown, seconds=LISTING_SECONDS)

    def _ask(self, path: str, do: Callable[[], T], missing: bool = False) -> T:
        """Calls `do()` with retries; `missing`: raise `FileNotFoundError` if there is no such file."""
        self._in_time()
        try:
            return patiently(do)
        except DataError:
            raise
        except Exception as error:
            if not lasting(error):
                raise _Unreachable(reason(error)) from error
            # S3 answers "forbidden" for a missing file if the user may not list
            absent = isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError))
            if missing and (absent or status_of(error) in (403, 410)):
                raise FileNotFoundError(path) from error
            code = "url-unreadable-http" if self.http else "url-unreadable"
            raise DataError(code, url=self._where(path), reason=reason(error)) from error


def _inside(link: str, folder: str) -> str:
    """Where a link on a folder's page leads, if to a file in it, not elsewhere or to another sort order."""
    try:
        place = urljoin(f"{folder}/", link)
    except ValueError:
        return ""
    parent, _, name = place.rstrip("/").rpartition("/")
    return place if parent == folder and name not in (".", "..") and not {*name} & {*"?#"} else ""


def _leads_outside(name: str) -> bool:
    """Whether `name` is none of a file in its folder, on any system."""
    return name in ("", ".", "..") or bool({*name} & {*"/\\\0"})


def _digest(*texts: bytes) -> str:
    whole = hashlib.sha256()
    for text in texts:
        whole.update(hashlib.sha256(text).digest())
    return whole.hexdigest()[:12]
