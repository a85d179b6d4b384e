"""Image files with a sub-folder for each class as a source, decoded on access."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from ..base import DataError, unreadable
from ..base.annotations import as_annotated
from .compared import Compared, Parts, of_portions, sha_of_all
from .folder import list_tar, walk
from .images import Size, checked_size, decode, decode_into
from .pack.folders import arrange
from .remote import local
from .sources import ByBatch, Columns, Spec
from .stages import stage


@as_annotated
class ImageFolder(ByBatch):
    """The images in `path/<class>/<file>` as examples
    `{"image": (h, w, 3) uint8, "label": () int32}`.

    Classes are numbered by the sorted names of their folders, examples by class and file name.
    Files deeper inside a class's folder belong to the class, as for `pack`.

    *Arguments:*

    - `path`: a folder, its URL, or a `.tar`, `.tar.gz` or `.tar.xz` of one. Nothing is unpacked to
      disk: a plain `.tar` is read in place, and the encoded images of a compressed one stay in
      memory.
    - `size`: `(height, width)` or one number for both. Each image is scaled to cover it and cropped
      at the centre. `None` leaves the sizes as they are, and then all must be equal.
    - `split`: a folder inside `path` with the classes, such as `"train"`.

    *Attributes:* `names`: the names of the classes. `classes`: their number. `labels`: `(n,)`
    int32.

    The constructor raises `DataError` for a missing folder, no classes, a class without images,
    images outside of classes, or unsafe archive members. Access raises it, with the file's name,
    for images that cannot be decoded or differ in size. Hidden files and files without the suffix
    of an image are ignored.
    """

    def __init__(self, path: str | Path, size: int | Size | None = None, split: str | None = None):
        self.path = local(path)
        self.size = checked_size(size)
        if self.path.is_dir():
            below = self.path / (split or "")
            files = walk(below)
        else:
            below = self.path
            files = list_tar(below, lambda parts: split is None or split in parts[:-2])
            if split is not None:
                files.paths = [parts[parts.index(split) + 1 :] for parts in files.paths]
                files.folders = [f[f.index(split) + 1 :] for f in files.folders if split in f]
        listing = arrange(below, files)
        if len(listing.splits) > 1:
            raise DataError("classes-in-several-places", path=below)
        self.names = listing.names
        self._images = listing.splits["train"]
        self.labels = self._images.labels["label"]
        self._shape: tuple[int, ...] | None = None

    @property
    def classes(self) -> int:
        return len(self.names)

    @property
    def spec(self) -> Spec:
        """Column to the shape and type of one example. Without `size`, decodes the first image
        once."""
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
        return len(self._images)

    def fill(self, indices: np.ndarray, out: Columns) -> None:
        """Decodes the examples at `indices` `(n,)` into `out`. Thread-safe."""
        out["label"][:] = self.labels[indices]
        for row, index in enumerate(indices.tolist()):
            self._decode_into(index, out["image"][row])

    def compared(self) -> Compared:
        """Compares the names, classes and sizes of all files, and the contents of some. It does not
        notice a file that was replaced by one of the same size and is not among these."""
        images = self._images
        n = len(self)

        def digests(rows: np.ndarray) -> Parts:
            return {"contents": sha_of_all(map(self._read, rows.tolist()))}

        read, contents = of_portions(n, images.sizes.mean(), digests)
        parts = {
            "classes": sha_of_all(self.names),
            "files": sha_of_all(images.names),
            "sizes": sha_of_all([images.sizes.tobytes()]),
            **contents,
        }
        return Compared(parts, read, n)

    def _decode_into(self, index: int, out: np.ndarray) -> None:
        with stage("read"):
            data = self._read(index)
        try:
            with stage("decode"):
                shape = decode_into(data, out, self.size)
        except DataError as error:
            raise self._of(index, error) from error
        if shape != out.shape:
            first, file = (self._images.names[i] for i in (0, index))
            raise DataError(
                "image-sizes-differ",
                first=first,
                file=file,
                first_size=list(out.shape[:2]),
                size=list(shape[:2]),
            )

    def _of(self, index: int, error: DataError) -> DataError:
        """A decoder's `error` with the file's name."""
        if error.code in ("image-unreadable", "unreadable"):
            return error
        name = self._images.names[index]
        return DataError("image-unreadable", path=self.path, file=name, problem=error.fact)

    def _read(self, index: int) -> bytes:
        try:
            return self._images.read(index)["image"]
        except OSError as error:
            raise unreadable(self.path / self._images.names[index], error) from error
