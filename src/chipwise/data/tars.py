"""Images inside a tar archive, read without unpacking it to disk.

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
from collections.abc import Callable
from lzma import LZMAError
from pathlib import Path
from typing import IO, Any

import psutil

from ..errors import DataError
from .files import Files, refuse_duplicates, wanted

_COMPRESSED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\0": lzma.open, b"BZh": bz2.open}
MAX_BYTES = 8 << 30  # encoded images kept in memory at most, and never more than half of what is free


def list_tar(path: Path, of: Callable[[tuple[str, ...]], bool] = lambda parts: True) -> Files:
    """The images in an archive `.tar`, `.tar.gz`, `.tar.bz2` or `.tar.xz` whose parts are `of` it.

    Raises `DataError` for members that point outside, links, two of one name, damage, and compressed
    archives that memory cannot hold.
    """
    limit = min(MAX_BYTES, psutil.virtual_memory().available // 2)
    held = 0
    try:
        with open(path, "rb") as file:
            head = file.read(6)
        unzip = next((opener for magic, opener in _COMPRESSED.items() if head.startswith(magic)), None)
        found = Files(read=_Places(path) if unzip is None else bytes)
        opened: Any = open(path, "rb") if unzip is None else _Stream(unzip(path, "rb"))  # noqa: SIM115
        with opened as file, tarfile.open(fileobj=file, mode="r:" if unzip is None else "r|") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # or it keeps 1 kB a member
                parts = _parts(path, member)
                if member.isdir():
                    found.folders.append(parts)
                    continue
                if not parts or any(part.startswith(".") for part in parts):
                    continue
                if not wanted(parts[-1]):
                    found.left_out.append("/".join(parts))
                    continue
                if not of(parts):
                    continue
                if not member.isfile() or member.issparse():
                    raise DataError(f"{path} holds a link, {member.name[:80]!r}: pack the files themselves.")
                if unzip is None:
                    found.add(parts, member.size, (member.offset_data, member.size))
                    continue
                held += member.size
                if held > limit:
                    raise DataError(
                        f"{path} holds more than {limit / 1e9:.1f} GB of images, which a compressed archive "
                        f"keeps in memory: decompress it (xz -dk, gunzip -k) and give the .tar."
                    )
                stream = archive.extractfile(member)
                assert stream is not None  # a regular file
                found.add(parts, member.size, stream.read())
            end = archive.offset  # type: ignore[attr-defined]
            file.seek(end)
            # tarfile takes a cut and a damaged header, too, for the end
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"neither a member nor the end at byte {end:,}")
            while unzip is not None and file.read(1 << 20):
                pass  # at its end the decompressor checks the sum
    except (tarfile.TarError, EOFError, zlib.error, LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged, truncated or not an archive ({error}): get it again.") from error
    except OSError as error:
        if error.errno is None:  # bz2's word for damage
            raise DataError(f"{path} is damaged ({error}): get it again.") from error
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
    refuse_duplicates(["/".join(parts) for parts in found.paths], path)
    return found


class _Stream:
    """A decompressor that may step back a little: what was read last is kept."""

    def __init__(self, file: IO[bytes]):
        self._file, self._kept, self._back = file, b"", 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def seek(self, place: int) -> None:
        self._back = self._file.tell() - place
        assert 0 <= self._back <= len(self._kept)

    def read(self, size: int) -> bytes:
        old = self._kept[len(self._kept) - self._back :][:size]
        self._back -= len(old)
        new = self._file.read(size - len(old)) if len(old) < size else b""
        self._kept = (self._kept + new)[-2 * tarfile.RECORDSIZE :]
        return old + new


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
            raise DataError(f"{self._path} ends early")
        return data

    def __reduce__(self) -> tuple:
        return type(self), (self._path,)  # another process opens its own

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _parts(path: Path, member: tarfile.TarInfo) -> tuple[str, ...]:
    # Strings, not pathlib: 60,000 members cost a second more with it
    parts = tuple(part for part in member.name.split("/") if part not in ("", "."))
    if member.name.startswith("/") or ".." in parts:
        raise DataError(f"{path} holds a member outside its folder, {member.name[:80]!r}: refused.")
    return parts
