"""Data at a URL: listed, fetched in parallel into the cache on disk, and read from there like any other.

    local("s3://bucket/flowers")        a folder, or a packed folder: s3, gs, https, whatever fsspec knows
    local("https://host/flowers.tar")   a single file

A plain web server need not list its folders when the folder is a packed one: manifests name every file.
What was fetched is used again until the files at the URL change.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from ..errors import DataError
from .cache import Cache
from .fetch import File, lasting, patiently, reason, status_of, transfer
from .manifest import FORMAT, MANIFEST

T = TypeVar("T")

_SPLITS = ("train", "eval")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SQUEEZED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")  # what pathlib makes of one
# What filesystems call the mark of a file's contents: S3, HTTP, Google, Azure, Hugging Face, SFTP, memory
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
_PACKAGES = {
    **dict.fromkeys(("http", "https"), "aiohttp"),
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    "hf": "huggingface_hub",
}


def local(
    path_or_url: str | Path,
    *,
    limit_bytes: float | None = None,
    workers: int = 16,
    say: Callable[[str], None] | None = None,
) -> Path:
    """The path on this machine of data that may be elsewhere.

    A path, or `file://`, is returned as it is, with `~` expanded. Of a URL, the folder (with all that is in
    it; of a packed folder, what its manifests name) or the single file is fetched and the copy's path
    returned. The copy is in use by this process, and is not evicted, until it ends or calls `cache.release`.

    *Arguments:*

    - `limit_bytes`: of all fetched data together; `None`: CHIPWISE_CACHE_BYTES, else half of the free disk.
      The cache is CHIPWISE_CACHE, else the user's cache folder.
    - `workers`: parts of up to 8 MiB fetched at once.
    - `say`: told in lines what is fetched and how far it came; `None`: standard error.

    A fetch that was interrupted goes on, by file. Without connection a copy fetched before is used, and said.

    Raises `DataError` for an unknown or unreachable URL, a missing library, data larger than the limit,
    a full disk, and a transfer that fails again and again.
    """
    text = os.fspath(path_or_url)
    if not _SCHEME.match(text):
        if isinstance(path_or_url, Path) and _SQUEEZED.match(text) and not path_or_url.exists():
            raise DataError(f"{text} was a URL before it was made a Path: give it as a string.")
        return Path(text).expanduser()
    if text.lower().startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    url = _Url(text, workers)
    try:
        cache = Cache(limit_bytes)
        prefix = f"{url.name}-{_digest(text.rstrip('/').encode())}-"
        try:
            listing = url.look()
        except _Unreachable as error:
            old = cache.newest(prefix)
            if old is None:
                raise DataError(f"Cannot reach {url.shown}: {error}.") from error
            say(f"Cannot reach {url.shown} ({error}): using the copy of it that was fetched before")
            return old / url.name
        name = prefix + listing.version
        while (entry := cache.use(name)) is None:
            with cache.filling(name, listing.nbytes, url.shown, say) as folder:
                if folder is not None:
                    target = folder / url.name
                    listing.save(target)
                    transfer(url, listing.files, folder if listing.single else target, folder, workers, say)
        return entry / url.name
    except OSError as error:  # of the disk: the network's are handled where they come
        raise DataError(
            f"{url.shown} cannot be kept in {error.filename or 'the cache'} ({error.strerror or error}): "
            f"make room, or set CHIPWISE_CACHE to another folder; the same command goes on from there."
        ) from error


@dataclass(frozen=True)
class _Listing:
    files: tuple[File, ...]
    version: str  # another when the files change
    single: bool = False
    texts: dict[str, bytes] = field(default_factory=dict)  # files read already: the manifests

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files) + sum(map(len, self.texts.values()))

    def save(self, folder: Path) -> None:
        for name, text in self.texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text)


class _Unreachable(Exception):
    """The network's fault, perhaps not there tomorrow."""


class _Url:
    """A folder or file at a URL. `shown`: the URL without passwords and signatures, for messages."""

    def __init__(self, text: str, workers: int):
        self.protocol = text.partition("://")[0].lower()
        self.http = self.protocol in ("http", "https")
        self.shown = re.sub(r"//[^/@]*@", "//", text.partition("?")[0] if self.http else text)
        place = urlsplit(text).path if self.http else text.partition("://")[2]
        name = unquote(place) if self.http else place
        self.name = re.sub(r"[^\w.+-]+", "_", name.rstrip("/").rsplit("/", 1)[-1]).lstrip(".") or "data"
        self._text, self._workers = text, workers
        _, self.path = self._open()
        self.path = self.path.rstrip("/") if "?" not in text else self.path

    @property
    def fs(self) -> Any:
        """The fsspec filesystem: one for all threads if it is made for it, else one a thread."""
        return self._open()[0]

    def _open(self) -> tuple[Any, str]:
        import fsspec

        options: dict[str, Any] = {}
        try:
            if self.http:
                import aiohttp

                # Its own limit of 5 minutes a file is too short for a big one; proxies from the environment
                timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
                client = {"trust_env": True, "timeout": timeout}
                options = {"simple_links": False, "client_kwargs": client}
            return fsspec.core.url_to_fs(self._text, **options)  # kept by fsspec, not made each time
        except ImportError as error:
            package = _PACKAGES.get(self.protocol)
            how = f"pip install {package}" if package else " ".join(str(error).split())
            raise DataError(f"Reading {self.protocol}:// needs another library: {how}.") from error
        except ValueError as error:
            raise DataError(
                f"{self.shown}: {' '.join(str(error).split())}. Expected a folder on this machine, or a URL "
                f"such as s3://bucket/folder, gs://bucket/folder or https://host/folder."
            ) from error

    def look(self) -> _Listing:
        """What there is to fetch. Raises `_Unreachable`, and `DataError` when that cannot be listed."""
        self.fs.invalidate_cache()
        packed = {} if self.http and "?" in self.path else self._manifests()
        if packed:
            return self._packed(packed)
        if not self._text.endswith("/"):
            info = self._ask(self.path, lambda: self.fs.info(self.path))
            if info["type"] != "directory" and not (self.http and info.get("mimetype") == "text/html"):
                return self._listing({self.name: info}, single=True)
        found = self._walk()
        if not found:
            raise DataError(f"{self.shown} is empty, or does not list its files{self._advice}.")
        return self._listing(found)

    def _manifests(self) -> dict[str, bytes]:
        found = {}
        for split in _SPLITS:
            name = f"{split}/{MANIFEST}"
            path = f"{self.path}/{name}"
            try:
                found[name] = self._ask(path, functools.partial(self.fs.cat_file, path), missing=True)
            except FileNotFoundError:
                if split == _SPLITS[0]:
                    break
        return {name: text for name, text in found.items() if _manifest(text)}

    def _packed(self, texts: dict[str, bytes]) -> _Listing:
        files = []
        for at, text in texts.items():
            folder = PurePosixPath(at).parent
            try:
                for shard in _manifest(text)["shards"]:
                    for file in shard["files"].values():
                        name = str(file["name"])
                        if PurePosixPath(name).name != name or name in (".", ".."):
                            raise DataError(
                                f"{self.shown}/{at} names a file outside its folder, {name!r}: refused."
                            )
                        remote = f"{self.path}/{folder}/{quote(name) if self.http else name}"
                        files.append(
                            File(f"{folder}/{name}", remote, int(file["bytes"]), str(file["sha256"]))
                        )
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise DataError(
                    f"{self.shown}/{at} is damaged ({type(error).__name__}: {error}): pack the data again."
                ) from error
        return _Listing(tuple(files), _digest(*texts.values()), texts=texts)

    def _listing(self, found: dict[str, dict[str, Any]], single: bool = False) -> _Listing:
        files = []
        for name, info in sorted(found.items()):
            if info.get("size") is None:
                raise DataError(
                    f"{self.shown}: the server does not say how large {name} is: fetch it yourself and give "
                    f"its path."
                )
            files.append(File(name, info["name"], int(info["size"])))
        marks = [[str(found[f.name].get(mark, "")) for mark in _MARKS] for f in files]
        known = json.dumps([[f.name, f.nbytes, *m] for f, m in zip(files, marks, strict=True)])
        return _Listing(tuple(files), _digest(known.encode()), single)

    def _walk(self) -> dict[str, dict[str, Any]]:
        """Every file below: name, with `/` on any system, to fsspec's information about it.

        Not fsspec's own `find`, which leaves out a folder that could not be read, and reads one at a time.
        """
        files: dict[str, dict[str, Any]] = {}
        with ThreadPoolExecutor(self._workers) as threads:
            folders = [("", self.path)]
            while folders:
                below = []
                for (prefix, _), infos in zip(folders, threads.map(self._ls, folders), strict=True):
                    for info in infos:
                        name = info["name"].rstrip("/").rsplit("/", 1)[-1]
                        name = unquote(name) if self.http else name
                        if name in ("", ".", "..") or {*name} & {*"/\\\0"}:
                            raise DataError(
                                f"{self.shown} names a file outside its folder, {name!r}: refused."
                            )
                        if info["type"] == "directory":
                            below.append((f"{prefix}{name}/", info["name"].rstrip("/")))
                        else:
                            files[prefix + name] = info
                folders = below
            if self.http:  # its lists have names only
                full = threads.map(
                    lambda i: self._ask(i["name"], lambda: self.fs.info(i["name"])), files.values()
                )
                files = dict(zip(files, full, strict=True))
        return files

    def _ls(self, folder: tuple[str, str]) -> list[dict[str, Any]]:
        path = folder[1]

        def ask() -> list[dict[str, Any]]:
            fs = self.fs
            fs.invalidate_cache(path)  # some filesystems remember their folders
            # A web page's links are relative to its folder, which ends in a slash
            return fs.ls(f"{path}/" if self.http else path, detail=True)

        infos = self._ask(path, ask)
        if self.http:
            infos = [{**i, "name": i["name"].replace("/./", "/")} for i in infos]
            return [i for i in infos if _inside(i["name"], path)]
        # Object stores may hold an empty object in the name of a folder
        return [i for i in infos if i["name"].strip("/") != path.strip("/")]

    def _ask(self, path: str, do: Callable[[], T], missing: bool = False) -> T:
        """`do()`, tried again where it helps; `missing`: `FileNotFoundError` when there is no such file."""
        try:
            return patiently(do)
        except Exception as error:
            if not lasting(error):
                raise _Unreachable(reason(error)) from error
            # Forbidden is what S3 says of a file that is not there to people who may not list
            absent = isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError))
            if missing and (absent or status_of(error) in (403, 410)):
                raise FileNotFoundError(path) from error
            where = self.shown.rstrip("/") + path.removeprefix(self.path)
            raise DataError(f"{where} cannot be read: {reason(error)}{self._advice}.") from error

    @property
    def _advice(self) -> str:
        if self.http:
            return ": check the address; a server that lists no files needs a tar or a packed folder"
        return ": check the address and your right to read it"


def _inside(link: str, folder: str) -> bool:
    """Whether a link on a folder's page is to what is in it: not to elsewhere, not to another order of it."""
    parent, _, name = link.rstrip("/").rpartition("/")
    return parent == folder and name not in (".", "..") and not {*name} & {*"?#"}


def _manifest(text: bytes) -> dict[str, Any]:
    """The manifest of a packed folder; empty for other people's files of that name."""
    try:
        manifest = json.loads(text)
    except ValueError:
        return {}
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else {}


def _digest(*texts: bytes) -> str:
    whole = hashlib.sha256()
    for text in texts:
        whole.update(hashlib.sha256(text).digest())
    return whole.hexdigest()[:12]
