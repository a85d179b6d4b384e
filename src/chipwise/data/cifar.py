"""CIFAR-10 and CIFAR-100 as their authors publish them: Python pickles or binary records.

Both hold an image as 3 planes (red, green, blue) of 32 × 32 bytes. The pickles are read without
executing them, see `unpickle`.

Source: A. Krizhevsky, https://www.cs.toronto.edu/~kriz/cifar.html (2009).
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np

from ..errors import DataError
from .sources import check_labels
from .unpickle import unpickle

_PIXELS = 3 * 32 * 32
_MAX_BYTES = 1 << 28  # CIFAR-100's training batch has 155 MB
# (classes, split): file names in order
_PICKLES = {
    (10, "train"): [f"data_batch_{i}" for i in range(1, 6)],
    (10, "test"): ["test_batch"],
    (100, "train"): ["train"],
    (100, "test"): ["test"],
}
# Where people keep them: the archives' own folders, or beside one another
FOLDERS = {10: ("cifar-10-batches-py", "cifar-10-batches-bin"), 100: ("cifar-100-python", "cifar-100-binary")}
ARCHIVES = {
    10: ("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"),
    100: ("cifar-100-python.tar.gz", "cifar-100-binary.tar.gz"),
}


def read_cifar(path: str | Path, splits: tuple[str, ...] = ("train", "test"), classes: int = 10) -> dict:
    """The original batches in a folder or a `.tar.gz`.

    *Arguments:*

    - `path`: the folder of the batch files, a folder above it, or the archive.
    - `splits`: what to read, of `"train"` and `"test"`; an archive is decompressed once for all.
    - `classes`: 10, or 100 (the fine labels).

    *Returns* split to `{"image": (n, 32, 32, 3) uint8, "label": (n,) int32}`.

    Raises `DataError` for files that are missing, damaged, or hold anything but data.
    """
    path = Path(path)
    wanted = {name: split for split in splits for name in _names(classes, split)}
    found: dict[str, dict] = {}
    for name, data in _files(path, wanted, classes):
        if name not in found:
            found[name] = read_batch(data, f"{path.name}/{name}", classes)
    out = {}
    for split in splits:
        pickles = _PICKLES[classes, split]
        batches = next(
            (names for names in (pickles, [f"{n}.bin" for n in pickles]) if all(n in found for n in names)),
            None,
        )
        if batches is None:
            missing = [n for n in pickles if n not in found and f"{n}.bin" not in found]
            raise DataError(
                f"{path} lacks {', '.join(missing)} of CIFAR-{classes}: expected the unpacked folder "
                f"{FOLDERS[classes][0]} or the archive {ARCHIVES[classes][0]}."
            )
        out[split] = {
            column: np.concatenate([found[name][column] for name in batches]) for column in ("image", "label")
        }
    return out


def read_batch(data: bytes, name: str, classes: int = 10) -> dict[str, np.ndarray]:
    """One batch file's bytes, pickled or binary (told by a name that ends in `.bin`).

    *Returns* `{"image": (n, 32, 32, 3) uint8, "label": (n,) int32}`; raises `DataError`, with `name`.
    """
    pixels, label = _binary(data, name, classes) if name.endswith(".bin") else _pickled(data, name, classes)
    image = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    batch = {"image": image, "label": label.astype(np.int32)}
    check_labels(batch, classes, name)
    return batch


def _pickled(data: bytes, name: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    batch = unpickle(data, name)
    if not isinstance(batch, dict):
        raise DataError(f"{name} holds a {type(batch).__name__}, expected a dict with 'data' and labels.")
    # Python 2 wrote its keys as bytes
    batch = {k.decode("latin-1") if isinstance(k, bytes) else k: v for k, v in batch.items()}
    key = "labels" if classes == 10 else "fine_labels"
    pixels, label = batch.get("data"), batch.get(key)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (_PIXELS,):
        raise DataError(
            f"{name} has no array 'data' of (n, {_PIXELS}) uint8; its keys: {sorted(map(str, batch))}."
        )
    if isinstance(label, list) and all(type(value) is int and abs(value) < 2**31 for value in label):
        label = np.array(label, np.int64)
    if not isinstance(label, np.ndarray) or label.shape != pixels.shape[:1]:
        raise DataError(
            f"{name} has no list '{key}' of {len(pixels)} integers; its keys: {sorted(map(str, batch))}."
        )
    return pixels, label


def _binary(data: bytes, name: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    labels = 1 if classes == 10 else 2  # CIFAR-100 puts the coarse label first
    record = labels + _PIXELS
    if not data or len(data) % record:
        raise DataError(
            f"{name} has {len(data):,} bytes, expected a multiple of {record:,} (label and pixels)."
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, record)
    return rows[:, labels:], rows[:, labels - 1]


def _names(classes: int, split: str) -> list[str]:
    if (classes, split) not in _PICKLES:
        raise DataError(
            f"CIFAR has classes=10 or 100 and splits 'train' and 'test', got {classes}, {split!r}."
        )
    names = _PICKLES[classes, split]
    return names + [f"{name}.bin" for name in names]


def _files(path: Path, wanted: dict[str, str], classes: int) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of the wanted files that are there."""
    if not path.exists():
        raise DataError(f"{path} does not exist, expected CIFAR-{classes}'s folder or archive.")
    try:
        if path.is_dir():
            for folder in (path, *(path / name for name in FOLDERS[classes])):
                for name in wanted:
                    if (folder / name).is_file():
                        yield name, _limited(folder / name, (folder / name).stat().st_size).read_bytes()
            return
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                stream = archive.extractfile(member) if name in wanted and member.isfile() else None
                if stream is not None:
                    _limited(path / name, member.size)
                    yield name, stream.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or not an archive ({error}): get it again.") from error
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error


def _limited(path: Path, size: int) -> Path:
    if size > _MAX_BYTES:
        raise DataError(f"{path} has {size:,} bytes, expected at most {_MAX_BYTES:,}.")
    return path
