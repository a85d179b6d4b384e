"""Data sets in files with many rows: Parquet, TFRecord and WebDataset.

    data/train-00000-of-00002.parquet   train-00000-of-01024   set-train-000000.tar
    data/test-00000-of-00001.parquet    validation-00000-of-…  set-val-000000.tar

A file's name decides between train and eval. Everything is read once to list and check it, and again to pack
it; memory holds names, labels and offsets, and for Parquet one row group.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError, RecipeError
from ...words.figures import one_line
from ..folder import MOST_IMAGE_BYTES, SUFFIXES, Member, Sparse
from . import tfrecord
from .folders import Listing, Split

COLUMNS = {
    "image": ("image", "image/encoded", "img", "jpg", "png", "jpeg"),
    "label": ("label", "labels", "image/class/label", "cls", "class", "target", "fine_label"),
    "text": ("text", "content", "document", "sentence"),
}
"""What columns are called elsewhere; the first that is there is taken where the user names none."""

_FILES = {
    "parquet": re.compile(r".*\.parquet"),
    "tfrecord": re.compile(r".*\.tfrecords?|.*-\d+-of-\d+"),
    "webdataset": re.compile(r".*\.tar"),
}
_FEWEST_ROWS = 1 << 16
"""Rows that a Parquet file may state whatever its size; beyond them no row is smaller than a byte."""
_LABEL_BYTES = 1 << 20
"""Of a member of a WebDataset that is read for its label."""
_SPLIT = re.compile(r"(?:^|[-_./])(train|eval|val|valid|validation|test)(?=[-_./]|$)")


@dataclass
class Rows:
    """The rows of some files: names, labels or `None`, and readers; `content` goes into the digest."""

    names: list[str] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    read: list[Callable[[], Mapping[str, Any]]] = field(default_factory=list)
    content: list[str] = field(default_factory=list)

    def add(self, name: str, label: Any, read: Callable[[], Mapping[str, Any]]) -> None:
        self.names.append(name)
        self.labels.append(label)
        self.read.append(read)

    def at(self, index: int) -> Mapping[str, Any]:
        return self.read[index]()


def files_at(path: Path) -> tuple[str, list[Path]] | None:
    """The kind of rows at `path`, "parquet", "tfrecord" or "webdataset", and their files; else `None`."""
    folders = [path, path / "data"] if path.is_dir() else []
    listed = [sorted(p for p in folder.iterdir() if p.is_file()) for folder in folders if folder.is_dir()]
    for files in listed or [[path] if path.is_file() else []]:  # reading a pipe might never end
        for kind, pattern in _FILES.items():
            matching = [file for file in files if pattern.fullmatch(file.name)]
            if matching and (kind != "webdataset" or any(map(_is_webdataset, matching))):
                return kind, matching
    return None


def _is_webdataset(path: Path) -> bool:
    """Whether one of the first images in a tar has a class member."""
    try:
        with tarfile.open(path, "r:", tarinfo=Member) as archive:
            first = [
                _key(member.name) for _, member in zip(range(16), archive, strict=False) if member.isfile()
            ]
    except (tarfile.TarError, OSError, ValueError, RecursionError):
        return False  # the reader of tars reports what is wrong
    images = {key for key, ending in first if f".{ending}" in SUFFIXES}
    return any(key in images and ending in ("cls", "json") for key, ending in first)


def from_rows(kind: str, files: Sequence[Path], columns: Mapping[str, str] | None = None) -> Listing:
    """The rows of `files`, of images or of numbers, with labels if there are any.

    Raises `DataError` with file and offset for truncated or damaged files.
    """
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_of(file.name), []).append(file)
    order: list[str] = [split for split in ("train", "eval") if split in by_split]
    found = {split: _READERS[kind](by_split[split], dict(columns or {})) for split in order}
    labels, classes = labels_of({split: rows.labels for split, rows in found.items()})
    entries: dict[str, Split] = {}
    for split, rows in found.items():
        content = hashlib.sha256("\n".join(rows.content).encode()).hexdigest()
        entries[split] = Split(
            names=rows.names,
            sizes=np.zeros(len(rows.names), np.int64),
            labels=labels[split],
            read=rows.at,
            content=content,
            threads=kind != "parquet",
        )
    return Listing(entries, classes, {"label": len(classes)} if classes else {})


def split_of(name: str) -> str:
    """ "train" or "eval", from a file's name; train by default."""
    match = _SPLIT.search(name.lower())
    return "eval" if match and match[1] != "train" else "train"


def chosen(role: str, there: Sequence[str], columns: Mapping[str, str], path: Path) -> str | None:
    """The column among `there` that is the image, the label or the text.

    Raises `DataError` if the user names a column that is missing.
    """
    if role in columns:
        if columns[role] not in there:
            raise DataError("rows-column", path=path, role=role, column=columns[role], columns=sorted(there))
        return columns[role]
    return next((name for name in COLUMNS[role] if name in there), None)


def labels_of(values: Mapping[str, list[Any]]) -> tuple[dict[str, dict[str, np.ndarray]], tuple[str, ...]]:
    """Labels by split, and the classes: sorted text, or integers from 0 to the largest."""
    every = [value for some in values.values() for value in some]
    if all(value is None for value in every):
        return {split: {} for split in values}, ()
    missing = next((row for row, value in enumerate(every) if value is None), None)
    if missing is not None:
        raise DataError("rows-label-missing", row=missing)
    if all(isinstance(value, str) for value in every):
        classes = tuple(sorted(set(every)))
        number = {name: i for i, name in enumerate(classes)}
        numbers = {s: np.asarray([number[v] for v in some], np.int32) for s, some in values.items()}
        return {split: {"label": column} for split, column in numbers.items()}, classes
    try:
        columns = {split: np.asarray(some) for split, some in values.items()}
    except (ValueError, OverflowError) as error:  # rows with different lengths
        raise DataError("rows-label-kind", label=str(every[0])[:60]) from error
    kinds = {column.dtype.kind for column in columns.values()}
    if not kinds <= set("biuf") or any(column.ndim > 2 for column in columns.values()):
        raise DataError("rows-label-kind", label=str(every[0])[:60])
    if "f" in kinds or any(column.ndim > 1 for column in columns.values()):
        return {split: {"label": column.astype(np.float32)} for split, column in columns.items()}, ()
    low, high = min(int(c.min()) for c in columns.values()), max(int(c.max()) for c in columns.values())
    if not 0 <= low <= high < 1 << 24:
        raise DataError("rows-label-range", low=low, high=high)
    labels = {split: {"label": column.astype(np.int32)} for split, column in columns.items()}
    return labels, tuple(map(str, range(high + 1)))


# ---- Parquet


def parquet(path: Path) -> Any:
    """An open Parquet file. Raises `DataError` for a damaged one."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise RecipeError("pack-library", library="pyarrow") from error
    with reading(path):
        return ParquetFile(path)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns pyarrow's errors for a damaged file into a `DataError`."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, LookupError, OSError, ValueError, OverflowError, MemoryError) as error:
        raise DataError("parquet-damaged", path=path, reason=one_line(error, 160)) from error


class _Group:
    """A cache of the row group that was read last."""

    def __init__(self) -> None:
        self.of: tuple[Path, int] | None = None
        self.rows: list[dict[str, Any]] = []

    def row(self, path: Path, group: int, at: int, columns: list[str]) -> dict[str, Any]:
        if self.of != (path, group):
            with reading(path), parquet(path) as file:
                self.rows = file.read_row_group(group, columns).to_pylist()
            self.of = path, group
        if at >= len(self.rows):
            raise DataError(
                "parquet-damaged", path=path, reason=f"row group {group} has {len(self.rows)} rows"
            )
        return self.rows[at]


def _parquet_rows(files: Sequence[Path], columns: Mapping[str, str]) -> Rows:
    listed, cached = Rows(), _Group()
    for path in files:
        with reading(path), parquet(path) as file:
            there = file.schema_arrow.names
            image, label = (chosen(role, there, columns, path) for role in ("image", "label"))
            taken = [image] if image else [name for name in there if name != label]
            groups = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
            size = path.stat().st_size
            if min(groups, default=0) < 0 or sum(groups) > max(_FEWEST_ROWS, size):
                raise ValueError(f"{sum(groups)} rows in {size} bytes")
            labels = file.read([label]).column(label).to_pylist() if label else []
            if label and len(labels) != sum(groups):
                raise ValueError(f"{len(labels)} labels for {sum(groups)} rows")
            listed.content.append(f"{path.name} {size} {file.schema_arrow} {groups}")
        row = 0
        for group, rows in enumerate(groups):
            for at in range(rows):

                def read(path=path, group=group, at=at, taken=taken, image=image) -> dict[str, Any]:
                    example = cached.row(path, group, at, taken)
                    return {"image": _encoded(example[image], path)} if image else dict(example)

                listed.add(f"{path.name}/{row:08}", labels[row] if label else None, read)
                row += 1
    return listed


def _encoded(image: Any, path: Path) -> Any:
    """An image's bytes; Hugging Face stores them with a path."""
    if isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes):
        return image["bytes"]
    if image is None or isinstance(image, Mapping):
        raise DataError("rows-image-missing", path=path)
    return image if isinstance(image, bytes) else np.asarray(image)


# ---- TFRecord


def _tfrecord_rows(files: Sequence[Path], columns: Mapping[str, str]) -> Rows:
    listed = Rows()
    for path in files:
        digest = hashlib.sha256()
        for row, (offset, data) in enumerate(tfrecord.records(path)):
            digest.update(data)
            features = _features(path, offset, data)
            image, label = (chosen(role, list(features), columns, path) for role in ("image", "label"))
            value = None if label is None else _single(features[label])
            value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            length = len(data)

            def read(path=path, offset=offset, length=length, image=image, label=label) -> dict[str, Any]:
                with open(path, "rb") as file:
                    file.seek(offset)
                    features = _features(path, offset, file.read(length))
                if image is not None:
                    return {"image": _single(features[image])}
                return {n.replace("/", "_"): _column(v) for n, v in features.items() if n != label}

            listed.add(f"{path.name}/{row:08}", value, read)
        listed.content.append(f"{path.name} {digest.hexdigest()}")
    return listed


def _features(path: Path, offset: int, data: bytes) -> dict[str, tfrecord.Value]:
    try:
        return tfrecord.example(data)
    except ValueError as error:  # of UnicodeDecodeError too
        raise DataError("tfrecord-no-example", path=path, offset=offset, reason=str(error)) from error


def _single(value: tfrecord.Value) -> Any:
    return value[0] if len(value) == 1 else _column(value)


def _column(value: tfrecord.Value) -> Any:
    if isinstance(value, list):
        raise DataError("rows-column-bytes", values=len(value))
    return value


# ---- WebDataset


def _key(name: str) -> tuple[str, str]:
    """Splits `a/b.left.jpg` into `a/b` and `left.jpg`, at the first dot of the file's name."""
    folder, slash, file = name.rpartition("/")
    stem, _, ending = file.partition(".")
    return folder + slash + stem, ending.lower()


def _webdataset_rows(files: Sequence[Path], columns: Mapping[str, str]) -> Rows:
    listed = Rows()
    for path in files:
        listed.content.append(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}")
        for key, members in _samples(path):
            image = columns.get("image") or next((e for e in members if f".{e}" in SUFFIXES), None)
            if image not in members:
                raise DataError("webdataset-no-image", path=path, name=key, endings=sorted(members))
            if (size := members[image][1]) > MOST_IMAGE_BYTES:
                name = f"{key}.{image}"
                raise DataError("image-file-too-large", name=name, bytes=size, limit=MOST_IMAGE_BYTES)

            def read(path=path, place=members[image]) -> dict[str, Any]:
                return {"image": _bytes(path, *place)}

            listed.add(f"{path.name}/{key}", _class(path, key, members, columns), read)
    return listed


def _samples(path: Path) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """The key of each sample, with its members' suffixes to offset and bytes; members are adjacent."""
    size, end = path.stat().st_size, 0
    sample: tuple[str, dict[str, tuple[int, int]]] | None = None
    try:
        with tarfile.open(path, "r:", tarinfo=Member) as archive:
            for member in archive:
                if not member.isfile():
                    continue
                end = member.offset_data + member.size
                if end > size:
                    raise DataError("webdataset-cut", path=path, offset=member.offset, name=member.name)
                key, ending = _key(member.name)
                if sample is None or sample[0] != key:
                    if sample is not None:
                        yield sample
                    sample = key, {}
                sample[1][ending] = member.offset_data, member.size
    except Sparse as error:
        raise DataError("member-sparse", path=path, name=str(error)[:80]) from error
    except (tarfile.TarError, OSError, ValueError, RecursionError) as error:
        reason = "chained headers" if isinstance(error, RecursionError) else str(error)
        raise DataError("webdataset-damaged", path=path, offset=end, reason=reason) from error
    if sample is not None:
        yield sample


def _class(path: Path, key: str, members: Mapping[str, tuple[int, int]], columns: Mapping[str, str]) -> Any:
    name = columns.get("label", "cls")
    offset, size = members.get(name if name in members else "json", (0, 0))
    if size > _LABEL_BYTES:
        reason = f"a label's member has {size} bytes"
        raise DataError("webdataset-damaged", path=path, offset=offset, reason=reason)
    if name in members:
        text = _bytes(path, *members[name]).decode("utf-8", "replace").strip()
        return int(text) if re.fullmatch("-?[0-9]{1,18}", text) else text
    if "json" not in members:
        return None
    try:
        stored = json.loads(_bytes(path, *members["json"]))
    except (ValueError, RecursionError) as error:
        raise DataError("webdataset-damaged", path=path, offset=offset, reason=str(error)) from error
    label = columns.get("label", "label")
    return stored.get(label) if isinstance(stored, dict) else None


def _bytes(path: Path, offset: int, size: int) -> bytes:
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.pread(handle, size, offset)
    finally:
        os.close(handle)


_READERS: dict[str, Callable[[Sequence[Path], Mapping[str, str]], Rows]] = {
    "parquet": _parquet_rows,
    "tfrecord": _tfrecord_rows,
    "webdataset": _webdataset_rows,
}
