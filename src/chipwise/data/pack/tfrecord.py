"""Reads TFRecord files without TensorFlow: their framing, and the fields of `tf.train.Example`.

    uint64 length | uint32 masked CRC-32C of it | data | uint32 masked CRC-32C of the data

(https://www.tensorflow.org/tutorials/load_data/tfrecord). The data is a protocol buffer: an Example
is a map from names to lists of bytes, float32 or int64.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...base import DataError, Fact, library
from ...base.protobuf import message_class
from .columns import chosen, labels_of, reading
from .folders import Listing, Split
from .pack_settings import PackSettings
from .splits import evaluated, splits_of

MOST = 1 << 30  # bytes of a record; a larger length is damage
_MASK = 0xA282EAD8

Value = list[bytes] | np.ndarray
"""The values of a feature: bytes, float32 or int64."""


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
            data = file.read(length)
            tail = file.read(4)
            if len(tail) < 4:
                raise DataError("tfrecord-cut", path=path, offset=offset, bytes=length)
            if _masked(data) != int.from_bytes(tail, "little"):
                raise DataError("tfrecord-damaged", path=path, offset=offset + 12, part="data")
            yield offset + 12, data
            offset += 16 + length


def example(data: bytes) -> dict[str, Value]:
    """The features of a `tf.train.Example`. Raises `ValueError` for other bytes."""
    from google.protobuf.message import DecodeError

    read = message_class(__package__, "example.textproto", "chipwise.Example")
    try:
        entries = read.FromString(data).features.feature
    except DecodeError as error:
        raise ValueError(str(error)) from error
    return {entry.key.decode(): _values(entry.value) for entry in entries}


def _values(feature: Any) -> Value:
    if feature.HasField("float_list"):
        return np.asarray(feature.float_list.value, np.float32)
    if feature.HasField("int64_list"):
        return np.asarray(feature.int64_list.value, np.int64)
    return list(feature.bytes_list.value)


# ---- the rows of files


def from_tfrecords(files: Sequence[Path], settings: PackSettings) -> Listing:
    """The examples of TFRecord `files`, with images or numbers, and with labels if there are any.

    Each file is read once here, to check it. Memory contains offsets and labels. Raises `DataError`
    with file and offset for truncated or damaged files.
    """
    places: dict[str, list[tuple[Path, int, int]]] = {}
    values: dict[str, list[Any]] = {}
    digests: dict[str, str] = {}
    read_as: list[Fact] = []
    columns = settings.columns or {}
    stated = splits_of(files, settings.eval_split)
    roles, told = evaluated({*stated.values()}, settings.eval_split, files[0].parent)

    def kept(features: dict[str, Value], label: str | None, path: Path) -> tuple[str | None, list]:
        """The column of images, and without one those of numbers."""
        image = chosen("image", list(features), columns, path)
        taken = (label, "label")  # beside another, a column of that name would replace it
        numbers = [n for n, v in features.items() if n not in taken and not isinstance(v, list)]
        if image is None and not numbers:
            numbers = [n for n in features if n != label]  # whose bytes are refused
        return image, [] if image else numbers

    for path in files:
        if (split := roles.get(stated[path])) is None:
            continue
        digest = hashlib.sha256()
        for offset, data in records(path):
            digest.update(data)
            features = _features(path, offset, data)
            label = chosen("label", list(features), columns, path)
            value = None if label is None else _single(features[label])
            values.setdefault(split, []).append(_text(value) if isinstance(value, bytes) else value)
            places.setdefault(split, []).append((path, offset, len(data)))
            image, others = kept(features, label, path)
            left = {*features} - {image, label, *others}
            told_now = reading({"image": image, "label": label}, others, left)
            read_as += [one for one in told_now if one not in read_as]
        digests[split] = f"{digests.get(split, '')}{path.name} {digest.hexdigest()} "

    def reader(places: list[tuple[Path, int, int]]) -> Callable[[int], Mapping[str, Any]]:
        def read(row: int) -> Mapping[str, Any]:
            path, offset, length = places[row]
            with open(path, "rb") as file:
                file.seek(offset)
                features = _features(path, offset, file.read(length))
            label = chosen("label", list(features), columns, path)
            image, others = kept(features, label, path)
            if image is not None:
                return {"image": _single(features[image])}
            return {n.replace("/", "_"): _column(features[n]) for n in others}

        return read

    labels, classes = labels_of(values, settings.labels)
    splits = {
        split: Split.numbered(len(at), reader(at), labels[split], content=digests[split])
        for split in ("train", "eval")
        if (at := places.get(split))
    }
    return Listing.classified(splits, classes, *told, *read_as, origin="label")


def _features(path: Path, offset: int, data: bytes) -> dict[str, Value]:
    try:
        return example(data)
    except ValueError as error:  # of UnicodeDecodeError too
        wrong = "{path}, byte {offset}: no tf.train.Example is there ({reason:plain})."
        raise DataError(
            "tfrecord-no-example", wrong, path=path, offset=offset, reason=str(error)
        ) from error


def _text(label: bytes) -> str:
    try:
        return label.decode()
    except UnicodeDecodeError as error:
        raise DataError("rows-label-kind", label=str(label)[:60]) from error


def _single(value: Value) -> Any:
    return value[0] if len(value) == 1 else _column(value)


def _column(value: Value) -> Any:
    if isinstance(value, list):
        wrong = "A column holds {values} byte strings: name the images' with --columns image=NAME."
        raise DataError("rows-column-bytes", wrong, values=len(value))
    return value


def _masked(data: bytes) -> int:
    """TFRecord's checksum: CRC-32C (Castagnoli), masked."""
    crc = library("google_crc32c", "pack-library", library="google-crc32c").value(data)
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF
