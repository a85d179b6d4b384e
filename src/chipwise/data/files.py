"""Image files: which there are below a folder or inside a tar archive, and how one is read.

A plain `.tar` is read at the members' places, so memory stays small whatever its size. A compressed one can
only be read from its beginning: its encoded images are held in memory, up to a limit.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tarfile
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from ..errors import DataError

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_COMPRESSED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\0": lzma.open, b"BZh": bz2.open}
MAX_BYTES = 8 << 30  # encoded images kept in memory at most, and never more than half of what is free


@dataclass
class Files:
    """Image files: path parts below the source, bytes, and what `read` takes; and what lies beside them."""

    paths: list[tuple[str, ...]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    folders: list[tuple[str, ...]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    read: Callable[[Any], bytes] = lambda key: b""

    def add(self, parts: tuple[str, ...], size: int, key: Any) -> None:
        self.paths.append(parts)
        self.sizes.append(size)
        self.keys.append(key)


def is_image(name: str) -> bool:
    """Whether a file's name is an image's."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def walk(root: Path) -> Files:
    """Every image file below `root`, hidden ones left out. Raises `DataError` for what cannot be read.

    A pipe, a socket or a device is no image file, whatever its name: reading one would never end.
    """
    files = Files(read=read_file)

    def enter(folder: str, parts: tuple[str, ...], above: frozenset) -> None:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda e: e.name)
        for entry in listed:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                status = entry.stat()
                here = (status.st_dev, status.st_ino)
                if here in above:
                    raise DataError("link-loop", path=entry.path)
                files.folders.append((*parts, entry.name))
                enter(entry.path, (*parts, entry.name), above | {here})
            elif is_image(entry.name) and (entry.is_file() or not os.path.exists(entry.path)):
                # A dangling link is found when it is read, and reported like other files that cannot be
                size = entry.stat().st_size if entry.is_file() else 0
                files.add((*parts, entry.name), size, entry.path)
            else:
                files.left_out.append("/".join((*parts, entry.name)))

    try:
        status = os.stat(root)
        enter(str(root), (), frozenset({(status.st_dev, status.st_ino)}))
    except OSError as error:
        raise unreadable(error.filename or root, error) from error
    return files


def read_file(path: str) -> bytes:
    with open(path, "rb", buffering=0) as stream:  # a buffer costs a small file as much as its reading
        return stream.readall()


def unreadable(path: Any, error: OSError) -> DataError:
    """What to raise for a file or folder that the system cannot read."""
    return DataError("unreadable", path=path, reason=error.strerror or str(error))


def refuse_duplicates(names: Sequence[str], path: Any) -> None:
    """Raises `DataError` when two entries of `path` have one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError("duplicate-name", path=path, name=name)
        seen.add(name)


def list_tar(path: Path, of: Callable[[tuple[str, ...]], bool] = lambda parts: True) -> Files:
    """The images in an archive `.tar`, `.tar.gz`, `.tar.bz2` or `.tar.xz` whose parts are `of` it.

    Raises `DataError` for members that point outside, links, two of one name, damage, and compressed
    archives that memory cannot hold.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(6)
        unzip = next((opener for magic, opener in _COMPRESSED.items() if head.startswith(magic)), None)
        files = Files(read=_Places(path) if unzip is None else bytes)
        mode = "r:" if unzip is None else "r|"
        with (
            open(path, "rb") if unzip is None else unzip(path, "rb") as file,
            tarfile.open(fileobj=file, mode=mode, tarinfo=_Member) as archive,  # type: ignore[call-overload]
        ):
            _list_members(path, archive, files, of, in_place=unzip is None)
            while unzip is not None and file.read(1 << 20):
                pass  # at its end the decompressor checks the sum
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError("file-damaged", path=path, reason=str(error)) from error
    except OSError as error:
        if error.errno is None:  # bz2's word for damage
            raise DataError("file-damaged", path=path, reason=str(error)) from error
        raise unreadable(path, error) from error
    refuse_duplicates(["/".join(parts) for parts in files.paths], path)
    return files


def _list_members(
    path: Path, archive: tarfile.TarFile, files: Files, of: Callable[..., bool], in_place: bool
) -> None:
    limit, held = min(MAX_BYTES, psutil.virtual_memory().available // 2), 0
    for member in archive:
        archive.members = []  # type: ignore[attr-defined]  # or it keeps 1 kB a member
        # Strings, not pathlib: 60,000 members cost a second more with it
        parts = tuple(part for part in member.name.split("/") if part not in ("", "."))
        if member.name.startswith("/") or ".." in parts:
            raise DataError("member-outside", path=path, name=member.name[:80])
        if member.isdir():
            files.folders.append(parts)
        elif parts and not any(part.startswith(".") for part in parts):
            if not is_image(parts[-1]):
                files.left_out.append("/".join(parts))
            elif of(parts):
                if not member.isfile() or member.issparse():
                    raise DataError("member-link", path=path, name=member.name[:80])
                if in_place:
                    files.add(parts, member.size, (member.offset_data, member.size))
                    continue
                held += member.size
                if held > limit:
                    raise DataError("archive-too-large", path=path, limit_bytes=limit)
                stream = archive.extractfile(member)
                assert stream is not None  # a regular file
                files.add(parts, member.size, stream.read())


class _Member(tarfile.TarInfo):
    """A member whose header is whole: tarfile takes a cut, and a damaged header, for the archive's end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"neither a member nor the end: {error}") from error


class _Places:
    """Reads `(offset, bytes)` of a file; several threads may do so at once."""

    def __init__(self, path: Path):
        self._path = path
        self._file: int | None = None
        self._lock = threading.Lock()

    def __call__(self, place: tuple[int, int]) -> bytes:
        with self._lock:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDONLY)
        offset, size = place
        data = os.pread(self._file, size, offset)
        if len(data) != size:
            raise DataError("file-damaged", path=self._path, reason="it ends early")
        return data

    def __reduce__(self) -> tuple:
        return type(self), (self._path,)  # another process opens its own

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)
