"""Labels from a CSV file: one row an image, its file first.

    file,label            file,label                file,sunny,snow         file,age
    a.jpg,cat             a.jpg,beach|dog           a.jpg,1,0               a.jpg,31.5

Text and whole numbers are classes; `|` or `;` separates several, which become a multi-hot row, as do several
columns of 0 and 1; numbers of which one has a decimal point are values to be predicted, kept as float32. A
column `split` sends rows to train, or to eval (also called val, valid, validation or test).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import DataError
from ..files import refuse_duplicates

_EVAL = ("eval", "val", "valid", "validation", "test")
_FILE = ("file", "filename", "file_name", "path", "image", "name", "image_id", "id")


@dataclass(frozen=True)
class Table:
    """*Fields:* `files` in the table's order; `labels` `(n,)` int32, `(n, k)` uint8 multi-hot, or float32
    `(n,)` or `(n, k)`; `classes`; `below` as in `Listing`; `splits`, each row's, or `None`."""

    path: Path
    files: list[str]
    labels: np.ndarray
    classes: tuple[str, ...]
    below: dict[str, int]
    splits: list[str] | None


def read_table(path: Path) -> Table:
    """Reads a table. Raises `DataError` for one that cannot be understood, with the line."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            numbered = [
                (reader.line_num, [cell.strip() for cell in row])
                for row in reader
                if any(cell.strip() for cell in row)
            ]
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8."
        ) from error
    except csv.Error as error:
        raise DataError(f"{path} is not a CSV file: {error}.") from error
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
    lines, rows = [line for line, _ in numbered], [row for _, row in numbered]
    if len(rows) < 2 or len(rows[0]) < 2:
        raise DataError(f"{path} has no labels: expected a line 'file,label' and a row an image.")
    header, rows, lines = rows[0], rows[1:], lines[1:]
    for line, row in zip(lines, rows, strict=True):
        if len(row) != len(header):
            raise DataError(
                f"{path}, line {line}: {len(row)} cells, expected {len(header)} ({', '.join(header)})."
            )
    lower = [name.lower() for name in header]
    at = next((lower.index(name) for name in _FILE if name in lower), 0)
    split_at = lower.index("split") if "split" in lower else None
    files = [row[at].replace("\\", "/").removeprefix("./") for row in rows]
    if any(name.startswith("/") or ".." in name.split("/") or not name for name in files):
        bad = next(n for n in files if n.startswith("/") or ".." in n.split("/") or not n)
        raise DataError(f"{path} names {bad!r}: expected files inside its folder, such as images/1.jpg.")
    refuse_duplicates(files, path)
    rest = [i for i in range(len(header)) if i not in (at, split_at)]
    if not rest:
        raise DataError(f"{path} has no column of labels: expected 'file,label', got {', '.join(header)}.")
    where = [f"{path}, line {line} ({name})" for line, name in zip(lines, files, strict=True)]
    labels, classes, below = _labels(
        where, [header[i] for i in rest], [[row[i] for i in rest] for row in rows]
    )
    splits = None
    if split_at is not None:
        splits = [_split(row[split_at], place) for row, place in zip(rows, where, strict=True)]
    return Table(path, files, labels, classes, below, splits)


def _split(text: str, where: str) -> str:
    if text.lower() in ("train", *_EVAL):
        return "train" if text.lower() == "train" else "eval"
    raise DataError(f"{where}: split {text!r}, expected train or eval.")


def _labels(where: list[str], header: list[str], rows: list[list[str]]):
    numbers = _numbers(rows)
    if len(header) > 1:
        if numbers is None:
            row, cell = next((n, c) for n, row in enumerate(rows) for c in row if not _is_number(c))
            raise DataError(
                f"{where[row]}: {cell!r} is no number; expected one column of labels, or several of "
                f"numbers ({', '.join(header)})."
            )
        if ((numbers == 0) | (numbers == 1)).all():
            return numbers.astype(np.uint8), tuple(header), {}
        return numbers.astype(np.float32), (), {}
    values = [row[0] for row in rows]
    if numbers is not None and any("." in value or "e" in value.lower() for value in values):
        return numbers[:, 0].astype(np.float32), (), {}
    separator = next((s for s in "|;" if any(s in value for value in values)), None)
    if separator is not None:
        sets = [{part.strip() for part in value.split(separator)} - {""} for value in values]
        classes = tuple(sorted(set().union(*sets)))
        at = {name: number for number, name in enumerate(classes)}
        hot = np.zeros((len(values), len(classes)), np.uint8)
        for row, parts in enumerate(sets):
            hot[row, [at[part] for part in parts]] = 1
        return hot, classes, {}
    if "" in values:
        raise DataError(f"{where[values.index('')]}: the label is empty: expected a class or a number.")
    classes = tuple(sorted(set(values), key=(lambda v: (float(v), v)) if numbers is not None else None))
    at = {name: number for number, name in enumerate(classes)}
    return np.asarray([at[value] for value in values], np.int32), classes, {"label": len(classes)}


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def _numbers(rows: list[list[str]]) -> np.ndarray | None:
    """All cells as numbers `(n, k)`, or `None` when one is none."""
    if not all(_is_number(cell) for row in rows for cell in row):
        return None
    return np.asarray([[float(cell) for cell in row] for row in rows], np.float64)
