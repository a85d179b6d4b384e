"""Reads the original files of MNIST and CIFAR.

MNIST's are IDX: two zero bytes, a type code, the number of dimensions, each dimension as big-endian uint32,
the values. CIFAR's are binary records or Python pickles of an image as 3 planes (red, green, blue) of 32 × 32
bytes. The pickles are read without executing them, see `unpickle`.

Sources: Y. LeCun, C. Cortes, C. Burges, The MNIST database (1998); A. Krizhevsky,
https://www.cs.toronto.edu/~kriz/cifar.html (2009).
"""

from __future__ import annotations

import gzip
import hashlib
import math
import pickletools
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from ..atomic import open_regular
from ..errors import DataError, unreadable
from ..machine.limits import memory
from .folder import Member, Sparse
from .sources import Columns, check_labels

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_CHUNK = 1 << 20
MAX_BYTES = 1 << 28  # bytes of a batch; the largest, CIFAR-100's training batch, has 155 MB
MAX_STEPS = 1_000_000  # opcodes; that batch has 400,000
_PIXELS = 3 * 32 * 32
# (classes, split): file names in order, without the .bin of binary ones
_BATCHES = {
    (10, "train"): [f"data_batch_{i}" for i in range(1, 6)],
    (10, "test"): ["test_batch"],
    (100, "train"): ["train"],
    (100, "test"): ["test"],
}
# Common locations: the archives' folders, or all in one folder; binary first
FOLDERS = {10: ("cifar-10-batches-bin", "cifar-10-batches-py"), 100: ("cifar-100-binary", "cifar-100-python")}
ARCHIVES = {
    10: ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"),
    100: ("cifar-100-binary.tar.gz", "cifar-100-python.tar.gz"),
}


def batches_at(path: Path, classes: int) -> Path | None:
    """CIFAR's batches as published: the folder of their files, `path` or one below it, or the archive."""
    if path.is_file():
        return path if path.name in ARCHIVES[classes] else None
    first = _BATCHES[classes, "train"][0]
    for place in (path, *(path / name for name in FOLDERS[classes])):
        if any((place / f"{first}{end}").is_file() for end in ("", ".bin")):
            return place
    return None


def read_idx(path: str | Path, sha256: str | None = None) -> np.ndarray:
    """The array in an IDX file, plain or gzip-compressed, in native byte order.

    *Arguments:*

    - `path`: the file; compression is recognised by its first bytes, not by its name.
    - `sha256`: the expected SHA-256 of the uncompressed bytes, in hexadecimal; not checked if `None`.

    *Returns* an array of the shape and type that the header names.

    Raises `DataError` for files that are missing, damaged, not IDX, shorter or longer than the header says,
    or have another checksum.
    """
    path = Path(path)
    try:
        with open_regular(path) as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.GzipFile(fileobj=raw) if zipped else raw as stream:
                return _read_idx(stream, path, sha256)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError("file-damaged", path=path, reason=str(error)) from error
    except OSError as error:
        raise unreadable(path, error) from error


def _read_idx(stream: BinaryIO | gzip.GzipFile, path: Path, sha256: str | None) -> np.ndarray:
    head = stream.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES:
        raise DataError("idx-header", path=path, head=head.hex(" "), codes=[f"{c:02x}" for c in _IDX_TYPES])
    dtype, dimensions = np.dtype(_IDX_TYPES[head[2]]), head[3]
    sizes = stream.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise DataError("idx-dimensions", path=path, bytes=len(sizes), expected=4 * dimensions)
    shape = tuple(np.frombuffer(sizes, ">u4").tolist())
    expected = math.prod(shape) * dtype.itemsize
    # Read in pieces, and at most one byte too many: neither a header that states 2^60 bytes nor a small file
    # that unpacks to so many can exhaust the memory.
    values, limit = bytearray(), memory().available_bytes // 4
    while len(values) <= expected and (piece := stream.read(min(_CHUNK, expected + 1 - len(values)))):
        values += piece
        if len(values) > limit:
            raise DataError("file-too-large", path=path, bytes=expected, limit=limit)
    if len(values) != expected:
        code = "idx-short" if len(values) < expected else "idx-long"
        numbers = {"bytes": len(values), "expected": expected, "shape": shape, "dtype": dtype.name}
        raise DataError(code, path=path, **numbers)
    if sha256 is not None and (digest := hashlib.sha256(head + sizes + values).hexdigest()) != sha256:
        raise DataError("not-the-original", path=path, sha256=digest, expected=sha256)
    try:
        array = np.frombuffer(values, dtype).reshape(shape)
    except ValueError as error:  # more than 64 dimensions, or a zero beside sizes beyond the address space
        raise DataError("idx-shape", path=path, dimensions=dimensions, reason=str(error)) from error
    return array.astype(dtype.newbyteorder("="))


def read_cifar(path: str | Path, splits: tuple[str, ...] = ("train", "test"), classes: int = 10) -> dict:
    """The original batches in a folder or a `.tar.gz`; binary ones are preferred.

    *Arguments:*

    - `path`: the folder of the batch files, a folder above it, or the archive.
    - `splits`: what to read, of `"train"` and `"test"`; an archive is decompressed once for all.
    - `classes`: 10, or 100 (the fine labels).

    *Returns* split to `{"image": (n, 32, 32, 3) uint8, "label": (n,) int32}`.

    Raises `DataError` for files that are missing, damaged, or contain anything but data.
    """
    path = Path(path)
    for split in splits:
        if (classes, split) not in _BATCHES:
            raise DataError("cifar-unknown", classes=classes, split=split)
    names = [name for split in splits for name in _BATCHES[classes, split]]
    if not path.exists():
        raise DataError("cifar-absent", path=path, classes=classes)
    batches: dict[str, Columns] = {}
    try:
        for name, data in _in_folder(path, names, classes) if path.is_dir() else _in_archive(path, names):
            batches[name.removesuffix(".bin")] = read_batch(data, f"{path.name}/{name}", classes)
    except Sparse as error:
        raise DataError("member-sparse", path=path, name=str(error)[:80]) from error
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError("file-damaged", path=path, reason=str(error)) from error
    except RecursionError as error:  # headers that describe headers, thousands deep
        raise DataError("file-damaged", path=path, reason="chained headers") from error
    except OSError as error:
        raise unreadable(path, error) from error
    missing = [name for name in names if name not in batches]
    if missing:
        folder, archive = FOLDERS[classes][0], ARCHIVES[classes][0]
        raise DataError(
            "cifar-incomplete", path=path, missing=missing, classes=classes, folder=folder, archive=archive
        )
    return {
        split: {
            column: np.concatenate([batches[name][column] for name in _BATCHES[classes, split]])
            for column in ("image", "label")
        }
        for split in splits
    }


def read_batch(data: bytes, name: str, classes: int = 10) -> Columns:
    """Reads the bytes of a batch file, binary if its name ends with `.bin`, otherwise pickled.

    *Returns* `{"image": (n, 32, 32, 3) uint8, "label": (n,) int32}`; raises `DataError`, with `name`.
    """
    pixels, label = _binary(data, name, classes) if name.endswith(".bin") else _pickled(data, name, classes)
    image = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    batch = {"image": image, "label": label.astype(np.int32)}
    check_labels(batch, classes, name)
    return batch


def _binary(data: bytes, name: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    labels = 1 if classes == 10 else 2  # CIFAR-100 has the coarse label first
    record = labels + _PIXELS
    if not data or len(data) % record:
        raise DataError("cifar-records", path=name, bytes=len(data), record=record)
    rows = np.frombuffer(data, np.uint8).reshape(-1, record)
    return rows[:, labels:], rows[:, labels - 1]


def _pickled(data: bytes, name: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    batch = unpickle(data, name)
    if not isinstance(batch, dict):
        raise DataError("cifar-not-dict", path=name, kind=type(batch).__name__)
    # Python 2 wrote keys as bytes
    batch = {k.decode("latin-1") if isinstance(k, bytes) else k: v for k, v in batch.items()}
    key = "labels" if classes == 10 else "fine_labels"
    pixels, label, keys = batch.get("data"), batch.get(key), sorted(map(str, batch))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (_PIXELS,):
        raise DataError("cifar-no-pixels", path=name, pixels=_PIXELS, keys=keys)
    if isinstance(label, list) and all(type(value) is int and abs(value) < 2**31 for value in label):
        label = np.array(label, np.int64)
    if not isinstance(label, np.ndarray) or label.shape != pixels.shape[:1]:
        raise DataError("cifar-no-labels", path=name, column=key, examples=len(pixels), keys=keys)
    return pixels, label


def _in_folder(path: Path, names: list[str], classes: int) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of the batch files in the first common location that has all, or else some."""
    places = [(path / below, suffix) for suffix in (".bin", "") for below in ("", *FOLDERS[classes])]
    here = [[p for name in names if (p := place / (name + suffix)).is_file()] for place, suffix in places]
    for file in max(here, key=len):  # the first of the longest
        yield file.name, _limited(file, file.stat().st_size).read_bytes()


def _in_archive(path: Path, names: list[str]) -> Iterator[tuple[str, bytes]]:
    with open_regular(path) as file, tarfile.open(fileobj=file, mode="r|*", tarinfo=Member) as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # or it keeps 1 kB a member
            name = PurePosixPath(member.name).name
            known = name.removesuffix(".bin") in names and member.isfile()
            stream = archive.extractfile(member) if known else None
            if stream is not None:
                _limited(path / name, member.size)
                yield name, stream.read()


def _limited(path: Path, size: int) -> Path:
    if size > MAX_BYTES:
        raise DataError("file-too-large", path=path, bytes=size, limit=MAX_BYTES)
    return path


_NAMES = {"numpy.ndarray": "ndarray", "numpy.dtype": "dtype"}
_NAMES |= {f"numpy.{core}.multiarray._reconstruct": "reconstruct" for core in ("core", "_core")}
_VALUES = {  # opcodes whose argument is the value itself
    *("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_NEW: dict[str, Any] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "NONE": lambda: None}
_NEW |= {"NEWTRUE": lambda: True, "NEWFALSE": lambda: False}


class _Refused(Exception):
    """An opcode, a name or a call that plain data does not need."""


class _StandIn(str):
    """A placeholder for a NumPy object. Not a string, since values are recognised by their exact type."""


def unpickle(data: bytes, name: str) -> Any:
    """The value pickled in `data`, by Python 2 or in the protocols 3 and 4 of Python 3; nothing is executed.

    `pickle.load` runs any function that a file names. A subclass that allows only NumPy's would still pass
    any state to NumPy, hash keys for any time, and allocate its memo by a number in the file. So the opcodes
    are only parsed (`pickletools.genops`), and plain data is built from the few that these batches need.
    Names are compared with three known ones and never imported.

    Strings of Python 2 become bytes, arrays of uint8 read-only arrays. Raises `DataError`, with `name`, for
    any other opcode, name or call, for damage, trailing bytes, and more than `MAX_BYTES` or `MAX_STEPS`.
    """
    if len(data) > MAX_BYTES:
        raise DataError("file-too-large", path=name, bytes=len(data), limit=MAX_BYTES)
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at = 0
    try:
        for count, (opcode, argument, place) in enumerate(pickletools.genops(data)):
            at = place or 0
            if count >= MAX_STEPS:
                raise DataError("pickle-too-long", path=name, limit=MAX_STEPS)
            _step(opcode.name, argument, stack, marks, memo)
        (value,) = stack
        if at + 1 != len(data):
            raise ValueError("bytes after its end")
        return value
    except _Refused as error:
        raise DataError("pickle-refused", path=name, name=str(error)[:80], at=at) from error
    # Errors of parsing and building plain data from damaged bytes; nothing here calls foreign code.
    except (ValueError, TypeError, LookupError, OverflowError, EOFError, struct.error) as error:
        raise DataError("pickle-damaged", path=name, reason=" ".join(str(error).split())[:120]) from error


def _step(op: str, argument: Any, stack: list[Any], marks: list[int], memo: dict[int, Any]) -> None:
    """One opcode of the pickle machine."""

    def pop(count: int) -> list[Any]:
        start = len(stack) - count if count else marks.pop()  # 0: everything since the last mark
        if not 0 <= start <= len(stack):
            raise ValueError("too few values")
        items = stack[start:]
        del stack[start:]
        return items

    if op in _VALUES:
        stack.append(argument)
    elif op in ("BINSTRING", "SHORT_BINSTRING"):  # of Python 2
        stack.append(argument.encode("latin-1"))
    elif op in _NEW:
        stack.append(_NEW[op]())
    elif op == "MARK":
        marks.append(len(stack))
    elif op in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
        stack.append(tuple(pop(int(op[5:] or 0))))
    elif op in ("APPEND", "APPENDS"):
        items = pop(1 if op == "APPEND" else 0)
        _of(list, stack[-1]).extend(items)
    elif op in ("SETITEM", "SETITEMS"):
        items = pop(2 if op == "SETITEM" else 0)
        # Nested tuples that share their parts take exponential time to hash
        if not all(type(key) in (str, bytes, int) for key in items[::2]):
            raise ValueError("a dict key that is not text or a number")
        _of(dict, stack[-1]).update(zip(items[::2], items[1::2], strict=True))
    elif op in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
        memo[len(memo) if op == "MEMOIZE" else argument] = stack[-1]
    elif op in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif op in ("GLOBAL", "STACK_GLOBAL"):
        name = ".".join(_of(str, part) for part in (argument.split(" ") if op == "GLOBAL" else pop(2)))
        if name not in _NAMES:
            raise _Refused(name)
        stack.append(_StandIn(_NAMES[name]))
    elif op == "REDUCE":
        function, arguments = pop(2)
        first = _of(tuple, arguments)[0]
        if _of(_StandIn, function) == "reconstruct" and _of(_StandIn, first) == "ndarray":
            stack.append(_StandIn("array"))
        elif function == "dtype" and type(first) in (str, bytes) and first in ("u1", b"u1"):
            stack.append(_StandIn("uint8"))
        else:
            raise _Refused(f"REDUCE of {function}")
    elif op == "BUILD":
        (state,) = pop(1)
        if _of(_StandIn, stack[-1]) == "array":
            _, shape, dtype, fortran, content = _of(tuple, state)
            if _of(_StandIn, dtype) != "uint8" or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError("an array of something else than bytes")
            pixels = np.frombuffer(_of(bytes, content), np.uint8)  # a view: no copy
            stack[-1] = pixels.reshape(shape, order="F" if fortran else "C")
        elif stack[-1] != "uint8":  # whose state is not needed for bytes
            raise _Refused(op)
    elif op not in ("PROTO", "FRAME", "STOP"):
        raise _Refused(op)


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{type(value).__name__} where {kind.__name__} was expected")
    return value
