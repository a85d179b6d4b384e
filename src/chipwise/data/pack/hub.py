"""Data sets that Hugging Face's `datasets` reads: Parquet files, text, and the Hub's.

    data/train-00000-of-00002.parquet   reviews.jsonl   hf://datasets/ylecun/mnist

The library stores the data that it reads in CACHE/datasets, as memory-mapped files. Only its own
readers run: no code and no pickle of a data set.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...base import DataError, Fact, RecipeError, library
from ...base.figures import one_line
from ...base.files import home, open_regular
from ..class_names import numbers_of, unjoined
from ..folder import is_litter
from .columns import chosen, labels_of, only, reading
from .folders import Listing, Split
from .pack_settings import PackSettings
from .splits import evaluated, splits_of

_HUB = "hf://datasets/"
_FILES = {
    "parquet": re.compile(r".*\.parquet"),
    "tfrecord": re.compile(r".*\.tfrecords?|.*-\d+-of-\d+"),
}
_FEWEST_ROWS = 1 << 16
"""The number of rows that a Parquet file may state whatever its size. Beyond it, a file must have
at least a byte per row."""


_MOST_EXPANDED = 1 << 28  # bytes of the values of a small Parquet file
_LONGEST_LINE = 1 << 25  # bytes of a row of JSON or CSV


def on_hub(src: Any) -> bool:
    """Whether `src` is `hf://datasets/NAME` or `hf://datasets/OWNER/NAME`, and not a file of it."""
    return (
        isinstance(src, str) and src.startswith(_HUB) and src[len(_HUB) :].strip("/").count("/") < 2
    )


def from_hub(src: str) -> dict[str, Any]:
    """The data set of the Hub as split to a `datasets.Dataset`. Raises `DataError` if it cannot be
    read."""
    with _library(src) as datasets:
        return dict(datasets.load_dataset(src[len(_HUB) :].strip("/"), cache_dir=_cache()))


def files_at(path: Path) -> tuple[str, list[Path]] | None:
    """The kind of rows at `path`, "parquet" or "tfrecord", and their files, or `None`."""
    folders = [path, path / "data"] if path.is_dir() else []
    listed = [
        sorted(p for p in folder.iterdir() if p.is_file() and not is_litter(p.name))
        for folder in folders
        if folder.is_dir()
    ]
    for files in listed or [[path] if path.is_file() else []]:  # reading a pipe might never end
        for kind, pattern in _FILES.items():
            matching = [file for file in files if pattern.fullmatch(file.name)]
            if matching:
                return kind, matching
    return None


def from_parquet(files: Sequence[Path], settings: PackSettings) -> Listing:
    """The rows of Parquet `files`. The names of the files say which split they are of.

    Raises `DataError` for files that are damaged, or state more rows than they have bytes.
    """
    by_split: dict[str, list[Path]] = {}
    content: dict[str, str] = {}
    stated = splits_of(files, settings.eval_split)
    roles, told = evaluated({*stated.values()}, settings.eval_split, files[0].parent)
    for file in files:
        if (split := roles.get(stated[file])) is None:
            continue
        with _library(file), open(file, "rb") as opened:
            from pyarrow.parquet import read_metadata

            rows = read_metadata(file).num_rows
            size = file.stat().st_size
            if rows > max(_FEWEST_ROWS, size):
                raise ValueError(f"{rows:,} rows in {size:,} bytes")
            _refuse_expanding(file)
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        by_split.setdefault(split, []).append(file)
        content[split] = content.get(split, "") + digest
    splits = {}
    for split in sorted(by_split, reverse=True):
        names = [glob.escape(str(file)) for file in by_split[split]]  # which takes patterns
        # The library's key is the time of change
        known = hashlib.sha256(content[split].encode()).hexdigest()
        options = {"data_files": names, "split": "train", "cache_dir": f"{_cache()}/{known[:32]}"}
        with _library(by_split[split][0]) as datasets:
            splits[split] = datasets.load_dataset("parquet", **options)
    # The labels of files are numbered here: `names` are for objects, which state none
    return from_datasets(splits, replace(settings, names=()), files[0], content, told)


def text_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a table with text, one at a time. Raises `DataError` for a damaged one."""
    kind = {".parquet": "parquet", ".csv": "csv"}.get(path.suffix.lower(), "json")
    options: dict[str, Any] = {"keep_default_na": False} if kind == "csv" else {}
    with _library(path) as datasets:
        if kind == "parquet":
            _refuse_expanding(path)
        else:
            _refuse_long_lines(path)
        if kind == "json":  # not by the library: pyarrow crashes on a line that is null
            with open_regular(path) as file:
                for row in (json.loads(line) for line in file if line.strip()):
                    if not isinstance(row, dict):
                        raise ValueError(f"a line is {type(row).__name__}, not an object")
                    yield row
            return
        options |= {"data_files": glob.escape(str(path)), "split": "train", "streaming": True}
        yield from datasets.load_dataset(kind, **options)


def _refuse_expanding(path: Path) -> None:
    """Raises `ValueError` for a Parquet file of few bytes whose dictionaries repeat long values.

    Reads only the chunks for which that is possible, without expanding them.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        about = file.metadata
        limit = max(_MOST_EXPANDED, 100 * path.stat().st_size)
        groups = set()
        columns = set()
        for group in range(about.num_row_groups):
            for index in range(about.num_columns):
                chunk = about.row_group(group).column(index)
                bound = chunk.num_values * chunk.total_uncompressed_size
                if chunk.physical_type == "BYTE_ARRAY" and bound > limit:
                    groups.add(group)
                    columns.add(chunk.path_in_schema)
    if not groups:
        return
    total = 0
    with ParquetFile(path, read_dictionary=sorted(columns)) as file:
        for batch in file.iter_batches(256, sorted(groups), sorted(columns)):
            arrays = list(batch.columns)
            for array in arrays:  # which grows
                if pa.types.is_struct(array.type) or pa.types.is_list(array.type):
                    arrays += array.flatten() if pa.types.is_struct(array.type) else [array.values]
                elif pa.types.is_dictionary(array.type):
                    lengths = pc.binary_length(array.dictionary.cast(pa.binary()))
                    total += pc.sum(pc.take(lengths, array.indices).cast(pa.int64())).as_py() or 0
            if total > limit:
                raise ValueError(f"its values are more than {limit:,} bytes, 100 times the file")


def _refuse_long_lines(path: Path) -> None:
    """Raises `ValueError` for a line of more than two times `_LONGEST_LINE`, reading little of the
    file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        for at in range(0, size - _LONGEST_LINE, _LONGEST_LINE):
            file.seek(at)
            pieces = (file.read(1 << 16) for _ in range(_LONGEST_LINE >> 16))
            if not any(b"\n" in piece for piece in pieces):
                raise ValueError(f"a line of more than {_LONGEST_LINE:,} bytes")


def from_datasets(
    splits: Mapping[str, Any],
    settings: PackSettings,
    path: Any,
    content: Mapping[str, str],
    told: Sequence[Fact] = (),
) -> Listing:
    """The rows of `datasets.Dataset`s by split, with images or numbers, and with labels if there
    are any. Beside an image, and of columns that are no numbers, nothing is read.

    *Arguments:* `path`: the source, for errors. `content`: a digest of each split, where the
    library's own is not enough. `told`: how the splits were read.

    The classes are `settings.names`, by default those of the first split that states them. Labels
    of the others, and text where `settings.names` are given, are joined to them by name.
    """
    columns = settings.columns or {}
    names = settings.names
    read: dict[str, Any] = {}
    values: dict[str, list[Any]] = {}
    classes = tuple(names)
    read_as: list[Fact] = []
    for split, data in splits.items():
        with _library(path) as datasets:
            data = data.with_format(None)
            images = [
                n for n, feature in data.features.items() if isinstance(feature, datasets.Image)
            ]
            there = data.column_names
            image = chosen("image", there, columns, path)
            label = chosen("label", there, columns, path)
            image = image or only("image", images, path)
            for name in images:  # so that JPEGs can be stored unchanged
                data = data.cast_column(name, datasets.Image(decode=False))
            values[split] = list(data[label]) if label else [None] * len(data)
            own = tuple(getattr(data.features.get(label), "names", ()) or ())
            if label and (numbered := unjoined(classes, own, names, split)) is not None:
                read_as.append(numbered)
            classes = classes or own
            if own not in ((), classes):
                number = numbers_of(classes, own, split).tolist()
                values[split] = [v if v is None or v < 0 else number[v] for v in values[split]]
            texts = sorted({v for v in values[split] if isinstance(v, str)})
            if texts and names and settings.labels != "numbers":
                place = dict(zip(texts, numbers_of(names, texts, split).tolist(), strict=True))
                values[split] = [place.get(v) for v in values[split]]
            numbers = [n for n in there if _is_number(data.features[n])]
            others = [n for n in numbers if n not in (label, "label")]  # which would replace it
            if not image and not others:
                raise DataError("column-not-numbers", column=there[0], dtype="text")
            others = [] if image else others
            left = {*there} - {image, label, *others}
            told_now = reading({"image": image, "label": label}, others, left)
            read_as += [one for one in told_now if one not in read_as]
            read[split] = _reader(data.select_columns([image] if image else others), image, path)
    classes = () if settings.labels == "numbers" else classes
    labels, found = labels_of(values, settings.labels)
    entries = {}
    for split, data in splits.items():
        known = content.get(split, data._fingerprint)
        entries[split] = Split.numbered(
            len(data), read[split], labels[split], content=known, threads=False
        )
    origin = "names=" if names else "ClassLabel" if classes else "label"
    return Listing.classified(entries, classes or found, *told, *read_as, origin=origin)


def _is_number(feature: Any) -> bool:
    """Whether the cells of a column are numbers, or lists of them."""
    while hasattr(feature, "feature"):
        feature = feature.feature
    kind = str(getattr(feature, "dtype", ""))
    return kind.startswith(("int", "uint", "float", "half", "double", "bool"))


def _reader(data: Any, image: str | None, path: Any) -> Any:
    def read(index: int) -> Mapping[str, Any]:
        row = data[index]
        if image is None:
            return {name.replace("/", "_"): value for name, value in row.items()}
        value = row[image]
        encoded = value.get("bytes") if isinstance(value, Mapping) else value
        if encoded is None:  # a path would be that of any file on this machine
            raise DataError(
                "rows-image-missing", "{path}: row {row} has no image.", path=path, row=index
            )
        return {"image": encoded if isinstance(encoded, bytes) else np.asarray(encoded)}

    return read


def _cache() -> str:
    return str(home() / "datasets")


@contextlib.contextmanager
def _library(path: Any) -> Iterator[Any]:
    """A context with the library, without its progress bars. All errors of the library become a
    `DataError`."""
    datasets = library("datasets", "pack-library")
    bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    except (DataError, RecipeError):
        raise
    except Exception as error:
        reason = one_line(error.__cause__ or error, 160)
        wrong = "{path} cannot be read: {reason}"
        raise DataError("rows-unreadable", wrong, path=path, reason=reason) from error
    finally:
        if bars:
            datasets.enable_progress_bars()
