"""Lists image files on disk or in a tar archive.

A plain `.tar` is read at the members' offsets, so memory stays small. A compressed one can only be
read from its beginning, so its encoded images are kept in memory, up to a limit.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ..base import DataError, unreadable
from ..base.figures import one_line
from ..base.files import open_regular
from ..machine.limits import memory

SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".bmp", ".gif", ".webp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
}
_LITTER = {"@eadir", "#recycle", "$recycle.bin", "__macosx", "thumbs.db", "desktop.ini"}
TARS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2")
_COMPRESSED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\0": lzma.open, b"BZh": bz2.open}
# Encoded images kept in memory at most, and never more than half of what is free
MAX_BYTES = 8 << 30


MOST_IMAGE_BYTES = 1 << 28  # bytes of one encoded image
_MEMBER_BYTES = 1 << 10  # of memory that a member may take besides its image
DEEPEST = 100
MOST_WAYS = 100
_MOST_HEADER_BYTES = 1 << 20  # of a member's long name or extended attributes
_MOST_EXPANDED = 1 << 28  # bytes of a small compressed archive; of a large one 100 times its own


@dataclass
class Files:
    """Image files, and other files."""

    paths: list[tuple[str, ...]] = field(default_factory=list)
    """The parts of each image's path, relative to the source."""
    sizes: list[int] = field(default_factory=list)
    """The bytes of each image."""
    keys: list[Any] = field(default_factory=list)
    """The argument of `read` for each image."""
    folders: list[tuple[str, ...]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """The paths of other files."""
    read: Callable[[Any], bytes] = lambda key: b""
    """Returns the bytes of the image with a key."""

    def add(self, parts: tuple[str, ...], size: int, key: Any) -> None:
        """Adds a file. Raises `DataError` if it is too large for an image."""
        if size > MOST_IMAGE_BYTES:
            raise DataError(
                "image-file-too-large", name="/".join(parts), bytes=size, limit=MOST_IMAGE_BYTES
            )
        self.paths.append(parts)
        self.sizes.append(size)
        self.keys.append(key)


def is_litter(name: str) -> bool:
    """Whether a file or a folder is hidden, or one that systems and their file managers leave."""
    return name.startswith(".") or name.lower() in _LITTER


def is_image(name: str) -> bool:
    """Whether a file's name has the suffix of an image."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def walk(root: Path) -> Files:
    """All image files below `root`, except hidden ones and the litter of systems.

    Raises `DataError` for folders that cannot be read. Ignores pipes, sockets and devices, since
    reading them might never end. Raises `DataError` for folders more than `DEEPEST` deep and for
    links to one folder from more than `MOST_WAYS` places, for the same reason.
    """
    files = Files(read=read_file)
    ways: Counter[tuple[int, int]] = Counter()

    def enter(folder: str, parts: tuple[str, ...], above: frozenset) -> None:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda e: e.name)
        for entry in listed:
            if is_litter(entry.name):
                continue
            if entry.is_dir():
                status = entry.stat()
                here = (status.st_dev, status.st_ino)
                if here in above:
                    wrong = "{path} is a link to a folder above it: remove the link."
                    raise DataError("link-loop", wrong, path=entry.path)
                ways[here] += 1
                if len(parts) > DEEPEST or ways[here] > MOST_WAYS:
                    wrong = (
                        "{path} is below {deep} folders, or reached in {ways} ways by links: name "
                        "another."
                    )
                    raise DataError(
                        "folder-too-deep", wrong, path=entry.path, deep=DEEPEST, ways=MOST_WAYS
                    )
                files.folders.append((*parts, entry.name))
                enter(entry.path, (*parts, entry.name), above | {here})
            elif is_image(entry.name) and (entry.is_file() or not os.path.exists(entry.path)):
                # A dangling link is reported on access, like other unreadable files
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
    # For a small file a buffer costs as much as reading it
    with open(path, "rb", buffering=0) as stream:
        return stream.readall()


def refuse_duplicates(names: Sequence[str], path: Any) -> None:
    """Raises `DataError` if two entries of `path` have the same name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            wrong = "{path} has two entries named '{name:plain}': rename one or leave it out."
            raise DataError("duplicate-name", wrong, path=path, name=name)
        seen.add(name)


def list_tar(path: Path, of: Callable[[tuple[str, ...]], bool] = lambda parts: True) -> Files:
    """The images in an archive `.tar`, `.tar.gz`, `.tar.bz2` or `.tar.xz` for whose path parts `of`
    is true.

    Raises `DataError` for links, paths that point outside, duplicate names, damage, and compressed
    archives that do not fit in memory.
    """
    try:
        with open_regular(path) as file:
            head = file.read(6)
        unzip = next(
            (opener for magic, opener in _COMPRESSED.items() if head.startswith(magic)), None
        )
        files = Files(read=_Places(path) if unzip is None else bytes)
        mode = "r:" if unzip is None else "r|"
        with (
            open(path, "rb") if unzip is None else unzip(path, "rb") as file,
            tarfile.open(  # type: ignore[call-overload]
                fileobj=file, mode=mode, tarinfo=Member
            ) as archive,
        ):
            if unzip is None:
                _list_members(path, archive, files, of)
            else:
                most = max(_MOST_EXPANDED, 100 * path.stat().st_size)
                _list_members(path, archive, files, of, most)
                while file.read(1 << 20):  # the decompressor checks the checksum at the end
                    _refuse_expanding(file.tell(), most)
    except tarfile.FilterError as error:
        raise DataError("member-refused", path=path, reason=one_line(error, 160)) from error
    except (
        tarfile.TarError,
        EOFError,
        zlib.error,
        lzma.LZMAError,
        RecursionError,
        OSError,
    ) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(path, error) from error
        chained = isinstance(error, RecursionError)  # headers that describe headers, thousands deep
        reason = "chained headers" if chained else str(error)
        raise DataError("file-damaged", path=path, reason=reason) from error
    refuse_duplicates(["/".join(parts) for parts in files.paths], path)
    return files


def _list_members(
    path: Path,
    archive: tarfile.TarFile,
    files: Files,
    of: Callable[..., bool],
    expands_to: int | None = None,
) -> None:
    """Lists the members of an archive. `expands_to`: the bytes to which a compressed archive may
    expand. `None` means that the archive is read in place."""
    limit = min(MAX_BYTES, memory().available_bytes // 2)
    held = 0
    in_place = expands_to is None
    for member in archive:
        archive.members = []  # type: ignore[attr-defined]  # or it keeps 1 kB a member
        if expands_to is not None:  # before what it expands to is passed over
            _refuse_expanding(member.offset_data + member.size, expands_to)
        held += 0 if in_place else _MEMBER_BYTES + len(member.name)
        if held > limit:  # a small compressed file may have any number of members
            raise DataError("archive-too-large", path=path, limit_bytes=limit)
        # Refuses paths and links that lead outside, and devices. Nothing is extracted to that
        # folder
        tarfile.data_filter(member, "/chipwise")
        # Strings, since pathlib costs a second more for 60,000 members
        parts = tuple(part for part in member.name.split("/") if part not in ("", "."))
        if member.name.startswith("/") or ".." in parts:
            raise tarfile.OutsideDestinationError(member, member.name)
        if any(map(is_litter, parts)):
            continue
        if member.isdir():
            files.folders.append(parts)
        elif parts:
            if not is_image(parts[-1]):
                files.left_out.append("/".join(parts))
            elif of(parts):
                if not member.isfile():
                    raise tarfile.SpecialFileError(member)
                if in_place:
                    files.add(parts, member.size, (member.offset_data, member.size))
                    continue
                held += member.size
                if member.size > MOST_IMAGE_BYTES:
                    files.add(parts, member.size, b"")
                if held > limit:
                    raise DataError("archive-too-large", path=path, limit_bytes=limit)
                stream = archive.extractfile(member)
                assert stream is not None  # a regular file
                files.add(parts, member.size, stream.read())


def _refuse_expanding(nbytes: int, most: int) -> None:
    if nbytes > most:
        raise tarfile.ReadError(f"it expands to more than {most:,} bytes")


_EXTENDED = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE)
_EXTENDED += (tarfile.SOLARIS_XHDTYPE,)  # type: ignore[assignment]


class Member(tarfile.TarInfo):
    """A member with a complete header. tarfile itself takes a truncated or damaged header for the
    archive's end, reads an extended header of any size into memory, and loops forever at a negative
    size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.type in _EXTENDED and not 0 <= header.size <= _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"an extended header of {header.size} bytes")
        return header

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            member = super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"neither a member nor the end: {error}") from error
        if member.size < 0:
            raise tarfile.ReadError(f"a member of {member.size} bytes")
        return member

    def _sparse(self, *of: Any) -> Self:
        # A file with holes states any size and any number of parts. In the formats of pax the first
        # argument is the member, and `self` the header before it
        raise tarfile.SpecialFileError(of[0] if isinstance(of[0], Member) else self)

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _sparse


class _Places:
    """Reads `(offset, bytes)` of a file. Thread-safe."""

    def __init__(self, path: Path):
        self._path = path
        self._file = os.open(path, os.O_RDONLY)

    def __call__(self, place: tuple[int, int]) -> bytes:
        offset, size = place
        data = os.pread(self._file, size, offset)
        if len(data) != size:
            raise DataError("file-damaged", path=self._path, reason="it ends early")
        return data

    def __reduce__(self) -> tuple:
        return type(self), (self._path,)  # another process opens its own

    def __del__(self) -> None:
        os.close(self._file)
