"""Reads the original files of MNIST and CIFAR-10.

MNIST's are IDX: two zero bytes, a type code, the number of dimensions, each dimension as big-endian
uint32, bytes. CIFAR's are Python pickles of images as 3 planes (red, green, blue) of 32 × 32 bytes.
Only the published files are read. They are recognised by their digests, and read by an unpickler
that can create only arrays.

Sources: Y. LeCun, C. Cortes, C. Burges, The MNIST database (1998). A. Krizhevsky,
https://www.cs.toronto.edu/~kriz/cifar.html (2009).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..base import DataError, unreadable
from ..base.figures import one_line
from ..base.files import open_regular, toml_beside
from .sources import Columns

MOST_BYTES = 1 << 28  # read of a file; a batch has 31 MB, MNIST's images 47 MB

CIFAR_FOLDER = "cifar-10-batches-py"
CIFAR_ARCHIVE = "cifar-10-python.tar.gz"
CIFAR_SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
_DIGESTS = toml_beside(__file__)
MNIST_FILES: dict[str, list[str]] = _DIGESTS["mnist"]
"""File to two SHA-256: that of the published .gz, and that of its contents, which also fits
repacked files."""
CIFAR_BATCHES: dict[str, str] = _DIGESTS["cifar10"]
"""The MD5 of each file (no SHA-256 is published). All digests are those of Keras and
torchvision."""


def batches_at(path: Path) -> Path | None:
    """The path of CIFAR-10 as published at `path`: its archive, or the folder of its files, which
    is `path` or one below it."""
    if path.is_file():
        return path if path.name == CIFAR_ARCHIVE else None
    for place in (path, path / CIFAR_FOLDER):
        if place.name == CIFAR_FOLDER and place.is_dir():
            return place
    archive = path / CIFAR_ARCHIVE
    return archive if archive.is_file() else None


def read_idx(path: str | Path, sha256: str) -> np.ndarray:
    """The bytes in a published IDX file, plain or gzip-compressed, in the shape of its header.

    `sha256` is that of the uncompressed file, in hexadecimal. Raises `DataError` for files that are
    missing or damaged, and for any but the published one.
    """
    path = Path(path)
    try:
        with open_regular(path) as raw:
            zipped = raw.read(2) == b"\x1f\x8b"  # not by its name: some programs unpack and keep it
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if zipped else raw as stream:
                data = stream.read(MOST_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError("file-damaged", path=path, reason=str(error)) from error
    except OSError as error:
        raise unreadable(path, error) from error
    _check(path, hashlib.sha256(data).hexdigest(), sha256)
    dimensions = data[3]
    shape = np.frombuffer(data, ">u4", dimensions, 4).tolist()
    return np.frombuffer(bytearray(data), np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def read_cifar(path: Path) -> dict[str, Columns]:
    """The published batches in the folder or the archive `path`, from `batches_at`.

    *Returns* `train` and `test` to `{"image": (n, 32, 32, 3) uint8, "label": (n,) int32}`.

    Raises `DataError` for files that are missing, or are not the published ones. Nothing in them is
    executed.
    """
    splits: dict[str, list[Columns]] = {"train": [], "test": []}
    try:
        for name, data in sorted(_in_folder(path) if path.is_dir() else _in_archive(path)):
            _check(
                path / name,
                hashlib.md5(data, usedforsecurity=False).hexdigest(),
                CIFAR_BATCHES[name],
            )
            splits["test" if "test" in name else "train"].append(read_batch(data, path / name))
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError("file-damaged", path=path, reason=str(error)) from error
    except OSError as error:
        raise unreadable(error.filename or path, error) from error
    return {
        split: {
            column: np.concatenate([batch[column] for batch in batches])
            for column in ("image", "label")
        }
        for split, batches in splits.items()
    }


def read_batch(data: bytes, path: Path) -> Columns:
    """The images and labels in the bytes of a published batch. Raises `DataError` if it names
    anything but what arrays need."""
    batch = unpickle(data, path)
    image = batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return {"image": np.ascontiguousarray(image), "label": np.array(batch[b"labels"], np.int32)}


def _check(path: Path, digest: str, expected: str) -> None:
    """Raises `DataError` unless a file's digest is the expected one."""
    if digest != expected:
        raise DataError("not-the-original", path=path, digest=digest, expected=expected)


def _in_folder(path: Path) -> Iterator[tuple[str, bytes]]:
    for name in CIFAR_BATCHES:
        with open_regular(path / name) as file:
            yield name, file.read(MOST_BYTES)


def _in_archive(path: Path) -> Iterator[tuple[str, bytes]]:
    with open_regular(path) as file:
        _check(
            path,
            hashlib.file_digest(file, "sha256").hexdigest(),  # type: ignore[arg-type]
            CIFAR_SHA256,
        )
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r|gz") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if name in CIFAR_BATCHES and (stream := archive.extractfile(member)) is not None:
                    yield name, stream.read(MOST_BYTES)


class _ArraysOnly(pickle.Unpickler):
    """Unpickles arrays of bytes, numbers, text, lists and dicts: all that CIFAR's pickles need."""

    def find_class(self, module: str, name: str) -> Any:
        """A new function for each name that NumPy writes for an array. Imports nothing."""
        if (module, name) == ("numpy", "ndarray"):
            return "ndarray"  # only named, never called

        def reconstruct(kind: Any, *_: Any) -> np.ndarray:
            return np.empty(0, np.uint8)

        def dtype(kind: Any, *_: Any) -> np.dtype:
            if kind not in ("u1", b"u1"):
                raise pickle.UnpicklingError("it holds arrays of something else than bytes")
            return np.dtype(np.uint8)

        if (module, name) == ("numpy", "dtype"):
            return dtype
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return reconstruct
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def unpickle(data: bytes, path: Path) -> Any:
    """The value pickled in `data`. Strings of Python 2 are bytes.

    Raises `DataError` for any name but those of NumPy's arrays of bytes. Nothing in a pickle is
    executed.
    """
    try:
        return _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # damaged bytes raise what they like
        wrong = "{path} is damaged, or not of CIFAR ({reason}): nothing was executed. Get it again."
        raise DataError("pickle-refused", wrong, path=path, reason=one_line(error, 160)) from error
