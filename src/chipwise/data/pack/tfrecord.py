"""Reads TFRecord files without TensorFlow: their framing, and the fields of `tf.train.Example`.

    uint64 length | uint32 masked CRC-32C of it | data | uint32 masked CRC-32C of the data

(https://www.tensorflow.org/tutorials/load_data/tfrecord). The data is a protocol buffer: an Example is a map
from names to lists of bytes, float32 or int64. Only the wire format is needed here.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError, RecipeError
from .columns import chosen, labels_of, split_of
from .folders import Listing, Numbered, Split

MOST = 1 << 30  # bytes of a record; a larger length is damage
_MASK = 0xA282EAD8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types

Value = list[bytes] | np.ndarray
"""Of a feature: bytes, float32 or int64."""


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the offset and the checked data of each record.

    Raises `DataError` with file and offset for a truncated or damaged record.
    """
    with open(path, "rb") as file:
        offset = 0
        while head := file.read(12):
            length, expected = struct.unpack("<QI", head) if len(head) == 12 else (0, 0)
            if len(head) < 12 or length > MOST or _masked(head[:8]) != expected:
                raise DataError("tfrecord-damaged", path=path, offset=offset, part="length")
            data, tail = file.read(length), file.read(4)
            if len(tail) < 4:
                wrong = "{path} ends within the record of {bytes} bytes at byte {offset}. Get it again."
                raise DataError("tfrecord-cut", wrong, path=path, offset=offset, bytes=length)
            if _masked(data) != int.from_bytes(tail, "little"):
                raise DataError("tfrecord-damaged", path=path, offset=offset + 12, part="data")
            yield offset + 12, data
            offset += 16 + length


def example(data: bytes) -> dict[str, Value]:
    """The features of a `tf.train.Example`. Raises `ValueError` for other bytes."""
    found: dict[str, Value] = {}
    for features in _messages(data, 1):
        for entry in _messages(features, 1):
            names, values = list(_messages(entry, 1)), list(_messages(entry, 2))
            if len(names) != 1 or len(values) != 1:
                raise ValueError("a feature without its name or its values")
            found[names[0].decode()] = _values(values[0])
    return found


def _values(feature: bytes) -> Value:
    for number, kind, value in _fields(feature):
        if kind != _BYTES:
            break
        if number == 1:
            return list(_messages(value, 1))
        if number == 2:
            floats = (v for _, of, v in _fields(value) if of in (_BYTES, _FIXED32))
            return np.frombuffer(b"".join(floats), "<f4")
        if number == 3:
            return np.asarray(list(_integers(value)), np.int64)
    return []


def _integers(items: bytes) -> Iterator[int]:
    """The integers of a list, packed or not."""
    for _, kind, value in _fields(items):
        at = 0
        if kind == _VARINT:
            yield _signed(value)
        while kind == _BYTES and at < len(value):
            number, at = _varint(value, at)
            yield _signed(number)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _messages(data: bytes, number: int) -> Iterator[bytes]:
    return (value for n, kind, value in _fields(data) if n == number and kind == _BYTES)


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and value of each field: an int for a varint, else its bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, kind, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(data):
            raise ValueError("a field is longer than what is left")
        yield number, kind, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value & (1 << 64) - 1, at
    raise ValueError("a number without an end")


# ---- the rows of files


def from_tfrecords(files: Sequence[Path], columns: Mapping[str, str]) -> Listing:
    """The examples of TFRecord `files`, of images or of numbers, with labels if there are any.

    Each file is read once here, to check it; memory holds offsets and labels. Raises `DataError` with file
    and offset for truncated or damaged files.
    """
    places: dict[str, list[tuple[Path, int, int]]] = {}
    values: dict[str, list[Any]] = {}
    digests: dict[str, str] = {}
    for path in files:
        split, digest = split_of(path.name), hashlib.sha256()
        for offset, data in records(path):
            digest.update(data)
            features = _features(path, offset, data)
            label = chosen("label", list(features), columns, path)
            value = None if label is None else _single(features[label])
            values.setdefault(split, []).append(value.decode() if isinstance(value, bytes) else value)
            places.setdefault(split, []).append((path, offset, len(data)))
        digests[split] = f"{digests.get(split, '')}{path.name} {digest.hexdigest()} "

    def reader(places: list[tuple[Path, int, int]]) -> Callable[[int], Mapping[str, Any]]:
        def read(row: int) -> Mapping[str, Any]:
            path, offset, length = places[row]
            with open(path, "rb") as file:
                file.seek(offset)
                features = _features(path, offset, file.read(length))
            image, label = (chosen(role, list(features), columns, path) for role in ("image", "label"))
            if image is not None:
                return {"image": _single(features[image])}
            return {n.replace("/", "_"): _column(v) for n, v in features.items() if n != label}

        return read

    labels, classes = labels_of(values)
    splits: dict[str, Split] = {
        split: Split(
            names=Numbered(len(places[split])),
            sizes=np.zeros(len(places[split]), np.int64),
            labels=labels[split],
            read=reader(places[split]),
            content=digests[split],
        )
        for split in ("train", "eval")
        if split in places
    }
    return Listing(splits, classes, {"label": len(classes)} if classes else {})


def _features(path: Path, offset: int, data: bytes) -> dict[str, Value]:
    try:
        return example(data)
    except ValueError as error:  # of UnicodeDecodeError too
        wrong = "{path}, byte {offset}: no tf.train.Example is there ({reason:plain})."
        raise DataError("tfrecord-no-example", wrong, path=path, offset=offset, reason=str(error)) from error


def _single(value: Value) -> Any:
    return value[0] if len(value) == 1 else _column(value)


def _column(value: Value) -> Any:
    if isinstance(value, list):
        wrong = "A column holds {values} byte strings: name the images' with --columns image=NAME."
        raise DataError("rows-column-bytes", wrong, values=len(value))
    return value


def _masked(data: bytes) -> int:
    """TFRecord's checksum: CRC-32C (Castagnoli), masked."""
    try:
        from google_crc32c import value
    except ImportError as error:
        raise RecipeError("pack-library", library="google-crc32c") from error
    crc = value(data)
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF
