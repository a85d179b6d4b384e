"""Labels from a CSV file, with a row for each image.

    file,label            file,label                file,sunny,snow         file,age
    a.jpg,cat             a.jpg,beach|dog           a.jpg,1,0               a.jpg,31.5

Text and integers are classes. `|` or `;` separates several, which become a multi-hot row; so do several
columns of 0 and 1. Numbers are values to be predicted, as float32, if at least one has a decimal point. A
column `split` assigns rows to train or eval (also called val, valid, validation or test).
"""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...atomic import open_regular
from ...errors import DataError, unreadable
from ..folder import refuse_duplicates

_MOST_BYTES = 1 << 29  # of memory for the cells of a table, or for its multi-hot labels
EVAL = ("eval", "val", "valid", "validation", "test")  # of several folders, the first is used
_FILE = ("file", "filename", "file_name", "path", "image", "name", "image_id", "id")


@dataclass(frozen=True)
class LabelTable:
    """*Fields:* `files` in the table's order; `labels` `(n,)` int32, `(n, k)` uint8 multi-hot, or float32
    `(n,)` or `(n, k)`; `classes`; `below` as in `Listing`; `splits`: of each row, or `None`."""

    path: Path
    files: list[str]
    labels: np.ndarray
    classes: tuple[str, ...]
    below: dict[str, int]
    splits: list[str] | None


class _Row(NamedTuple):
    """A row and its position, for errors."""

    path: Path
    line: int
    cells: list[str]

    def wrong(self, given: object, expected: str) -> DataError:
        """The error for a row with something else than is expected."""
        wrong = "{path}, line {line}: {given!r}: expected {expected}."
        return DataError("table-row", wrong, path=self.path, line=self.line, given=given, expected=expected)


def read_table(path: Path) -> LabelTable:
    """Reads a table. Raises `DataError` with the line if it cannot be understood."""
    try:
        with io.TextIOWrapper(open_regular(path), "utf-8-sig", newline="") as stream:
            if os.fstat(stream.fileno()).st_size > _MOST_BYTES:
                raise _too_large(path, "file")
            heading, *rows = _read(path, stream) or [_Row(path, 0, [])]
    except UnicodeDecodeError as error:
        wrong = "{path} is not UTF-8 text ({reason} at byte {byte}): save it as UTF-8."
        raise DataError("table-no-text", wrong, path=path, reason=error.reason, byte=error.start) from error
    except csv.Error as error:
        wrong = "{path} is not a CSV file: {reason}."
        raise DataError("table-no-csv", wrong, path=path, reason=str(error)) from error
    except OSError as error:
        raise unreadable(path, error) from error
    header = heading.cells
    if not rows or len(header) < 2:
        raise heading.wrong(header, "a heading such as file,label, and a row for each image")
    for row in rows:
        if len(row.cells) != len(header):
            raise row.wrong(row.cells, f"{len(header)} cells")
    lower = [name.lower() for name in header]
    file_at = next((lower.index(name) for name in _FILE if name in lower), 0)
    split_at = lower.index("split") if "split" in lower else None
    files = [row.cells[file_at].replace("\\", "/").removeprefix("./") for row in rows]
    for row, name in zip(rows, files, strict=True):
        if name.startswith("/") or ".." in name.split("/") or not name:
            raise row.wrong(name, "a file in its folder, images/1.jpg; numbers alone go into cw.Arrays")
    refuse_duplicates(files, path)
    label_at = [i for i in range(len(header)) if i not in (file_at, split_at)]
    if not label_at:
        raise heading.wrong(header, "a column of labels, such as file,label")
    splits = None if split_at is None else [_split(row, split_at) for row in rows]
    return LabelTable(path, files, *_labels(rows, header, label_at), splits)


def _read(path: Path, stream: io.TextIOWrapper) -> list[_Row]:
    """The rows that are not empty. Raises `DataError` for more than `_MOST_BYTES`."""
    reader, rows, held = csv.reader(stream), [], 0
    for cells in reader:
        row = _Row(path, reader.line_num, [cell.strip() for cell in cells])
        held += 64 + 8 * len(cells) + sum(50 + len(cell) for cell in row.cells if len(cell) > 1)
        if held > _MOST_BYTES:
            raise _too_large(path, "rows")
        if any(row.cells):
            rows.append(row)
    return rows


def _too_large(path: Path, what: str) -> DataError:
    wrong = "The {what} of {path} would take more than {limit:bytes}: pack the data from Parquet instead."
    return DataError("table-too-large", wrong, path=path, what=what, limit=_MOST_BYTES)


def _split(row: _Row, column: int) -> str:
    split = row.cells[column].lower()
    if split not in ("train", *EVAL):
        raise row.wrong(row.cells[column], "train or eval")
    return "train" if split == "train" else "eval"


def _labels(
    rows: list[_Row], header: list[str], label_at: list[int]
) -> tuple[np.ndarray, tuple[str, ...], dict[str, int]]:
    """The labels, the classes, and the exclusive upper bounds of integer columns."""
    names = [header[i] for i in label_at]
    cells = [[row.cells[i] for i in label_at] for row in rows]
    numeric = all(_is_number(cell) for row in cells for cell in row)
    numbers = np.asarray([[float(cell) for cell in row] for row in cells] if numeric else [], np.float64)
    if len(names) > 1:
        if not numeric:
            at, cell = next((i, cell) for i, row in enumerate(cells) for cell in row if not _is_number(cell))
            raise rows[at].wrong(cell, f"numbers, of which there are several columns: {', '.join(names)}")
        if ((numbers == 0) | (numbers == 1)).all():
            return numbers.astype(np.uint8), tuple(names), {}
        return numbers.astype(np.float32), (), {}
    values = [row[0] for row in cells]
    if numeric and any("." in value or "e" in value.lower() for value in values):
        return numbers[:, 0].astype(np.float32), (), {}
    separator = next((s for s in "|;" if any(s in value for value in values)), None)
    if separator is not None:
        sets = [{part.strip() for part in value.split(separator)} - {""} for value in values]
        classes = tuple(sorted(set().union(*sets)))
        number = {name: i for i, name in enumerate(classes)}
        if len(values) * len(classes) > _MOST_BYTES:
            raise _too_large(rows[0].path, "multi-hot labels")
        hot = np.zeros((len(values), len(classes)), np.uint8)
        for row, parts in enumerate(sets):
            hot[row, [number[part] for part in parts]] = 1
        return hot, classes, {}
    if "" in values:
        raise rows[values.index("")].wrong("", "a class or a number")
    classes = tuple(sorted(set(values), key=(lambda v: (float(v), v)) if numeric else None))
    number = {name: i for i, name in enumerate(classes)}
    return np.asarray([number[value] for value in values], np.int32), classes, {"label": len(classes)}


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False
