"""Folders of images, one sub-folder a class, on disk or inside a tar archive.

    flowers/daisy/1.jpg, flowers/daisy/2.png, flowers/rose/1.jpg, ...

Classes are numbered by the sorted names of their folders, examples by class and file name. Files
are decoded when asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..errors import DataError
from ..words.facts import fact
from .columns import Spec
from .files import SUFFIXES, is_image, list_tar, read_file, unreadable
from .images import checked_size, decode, decode_into
from .remote import local
from .stages import stage


class ImageFolder:
    """The images in `path/<class>/<file>` as examples `{"image": (h, w, 3) uint8, "label": () int32}`.

    *Arguments:*

    - `path`: a folder or its URL, or a `.tar`, `.tar.gz` or `.tar.xz` that holds one; nothing is unpacked to
      disk: a plain `.tar` is read in place, a compressed one's encoded images are kept in memory.
    - `size`: `(height, width)` or one number for both: each image is scaled to cover it and cut around
      its centre. `None` keeps sizes as they are, and then all must be equal.
    - `split`: a folder inside `path` that holds the classes, such as `"train"`.

    *Attributes:* `names`, the classes' names; `classes`, their number; `labels` `(n,)` int32.

    Raises `DataError` when made for a missing folder, no classes, a class without images or unsafe
    archive members; and on access, with the file's name, for images that cannot be decoded or differ
    in size. Files that are hidden or have no image's suffix are left out.
    """

    def __init__(self, path: str | Path, size: int | tuple[int, int] | None = None, split: str | None = None):
        self.path = local(path)
        self.size = checked_size(size)
        self._open: Callable[[Any], bytes] = read_file
        if self.path.is_dir():
            below = self.path / (split or "")
            files = _in_folder(below)
        else:
            below = self.path
            files, self._open = _in_tar(self.path, split)
        if not files:
            raise DataError("no-class-folders", path=below)
        for name in sorted(files):
            if not files[name]:
                raise DataError("class-empty", path=self.path, name=name, suffixes=sorted(SUFFIXES))
        self.names = tuple(sorted(files))
        self._files = [(f"{c}/{name}", files[c][name]) for c in self.names for name in sorted(files[c])]
        counts = [len(files[c]) for c in self.names]
        self.labels = np.repeat(np.arange(len(self.names)), counts).astype(np.int32)
        self._shape: tuple[int, ...] | None = None

    @property
    def classes(self) -> int:
        return len(self.names)

    @property
    def spec(self) -> Spec:
        """Column to the shape and type of one example; without `size`, decodes the first image once."""
        if self._shape is None:
            try:
                self._shape = (*self.size, 3) if self.size else decode(self._read(0)).shape
            except DataError as error:
                raise self._of(0, error) from error
        return {
            "image": jax.ShapeDtypeStruct(self._shape, np.uint8),
            "label": jax.ShapeDtypeStruct((), np.int32),
        }

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        image = np.empty(self.spec["image"].shape, np.uint8)
        self._decode_into(index, image)
        return {"image": image, "label": self.labels[index]}

    def fill(self, indices: np.ndarray, out: dict[str, np.ndarray]) -> None:
        """Decodes the examples at `indices` `(n,)` into `out`; several threads may do so at once."""
        out["label"][:] = self.labels[indices]
        for row, index in enumerate(indices.tolist()):
            self._decode_into(index, out["image"][row])

    def _decode_into(self, index: int, out: np.ndarray) -> None:
        with stage("read"):
            data = self._read(index)
        try:
            with stage("decode"):
                shape = decode_into(data, out, self.size)
        except DataError as error:
            raise self._of(index, error) from error
        if shape != out.shape:
            raise DataError(
                "image-sizes-differ",
                first=self._files[0][0],
                first_size=list(out.shape[:2]),
                file=self._files[index][0],
                size=list(shape[:2]),
            )

    def _of(self, index: int, error: DataError) -> DataError:
        """`error`, which a decoder raised, with the file's name."""
        if error.code in ("image-unreadable", "unreadable"):
            return error
        problem = fact(error.code, **error.facts)
        return DataError("image-unreadable", path=self.path, file=self._files[index][0], problem=problem)

    def _read(self, index: int) -> bytes:
        name, key = self._files[index]
        try:
            return self._open(key)
        except OSError as error:
            raise unreadable(self.path / name, error) from error


def _in_folder(root: Path) -> dict[str, dict[str, Any]]:
    try:
        with os.scandir(root) as entries:
            classes = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
        files: dict[str, dict[str, Any]] = {}
        for name in classes:
            with os.scandir(root / name) as entries:
                files[name] = {e.name: e.path for e in entries if is_image(e.name)}
        return files
    except OSError as error:
        raise unreadable(error.filename or root, error) from error


def _in_tar(path: Path, split: str | None) -> tuple[dict[str, dict[str, Any]], Callable[[Any], bytes]]:
    """Class to file name to what the function returned beside it reads."""
    listed = list_tar(path, lambda parts: split is None or split in parts[:-2])
    files: dict[str, dict[str, Any]] = {}
    roots = set()
    for parts, key in zip(listed.paths, listed.keys, strict=True):
        if split is not None:
            parts = parts[parts.index(split) + 1 :]
        if len(parts) >= 2:
            *root, name, file = parts
            roots.add("/".join(root) or ".")
            files.setdefault(name, {})[file] = key
    if len(roots) > 1:
        raise DataError("classes-in-several-places", path=path, places=sorted(roots))
    return files, listed.read
