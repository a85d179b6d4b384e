"""Image files: which there are below a folder, and how one is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..words.figures import printable

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


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


def wanted(name: str) -> bool:
    """Whether a file's name is an image's."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def walk(root: Path) -> Files:
    """Every image file below `root`, hidden ones left out. Raises `DataError` for what cannot be read.

    A pipe, a socket or a device is no image file, whatever its name: reading one would never end.
    """
    found = Files(read=read_file)

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
                    raise DataError(f"{entry.path} is a link to a folder above it: remove the link.")
                found.folders.append((*parts, entry.name))
                enter(entry.path, (*parts, entry.name), above | {here})
            elif wanted(entry.name) and (entry.is_file() or not os.path.exists(entry.path)):
                # A dangling link is found when it is read, and reported like other files that cannot be
                size = entry.stat().st_size if entry.is_file() else 0
                found.add((*parts, entry.name), size, entry.path)
            else:
                found.left_out.append("/".join((*parts, entry.name)))

    try:
        status = os.stat(root)
        enter(str(root), (), frozenset({(status.st_dev, status.st_ino)}))
    except OSError as error:
        place = error.filename or root
        raise DataError(f"Cannot read the folder {place}: {error.strerror or error}.") from error
    return found


def read_file(path: str) -> bytes:
    with open(path, "rb", buffering=0) as stream:  # a buffer costs a small file as much as its reading
        return stream.readall()


def refuse_duplicates(names: Sequence[str], where: Any) -> None:
    """Raises `DataError` when two entries have one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(f"{where} has two entries named {name!r}: rename or remove one.")
        seen.add(name)


def few(names: Sequence[str], most: int = 3) -> str:
    """The first `most` names, and how many more there are, to be printed."""
    more = len(names) - most
    return ", ".join(map(printable, names[:most])) + (f" and {more:,} more" if more > 0 else "")
