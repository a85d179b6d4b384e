"""Labels from a CSV file, with a row for each image.

    file,label            file,label                file,sunny,snow         file,age
    a.jpg,cat             a.jpg,beach|dog           a.jpg,1,0               a.jpg,31.5

What labels are is declared, or all cells say the same. Text and integers are classes. `|` or `;`
separates several, which become a multi-hot row. Several columns of 0 and 1 become one too. Numbers
with a decimal point or an exponent are values to be predicted, as float32, and so are several
columns of other numbers. A column `split` assigns rows to train or eval (also called val, valid,
validation or test).
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...base import DataError, Fact, fact, unreadable
from ...base.files import open_regular
from ..class_names import nfc
from ..folder import refuse_duplicates
from .columns import COLUMNS, chosen, refuse_unknown
from .pack_settings import USUAL, PackSettings
from .splits import EVAL, evaluated

_MOST_BYTES = 1 << 29  # of memory for the cells of a table, or for its multi-hot labels
_FILE = ("file", "filename", "file_name", "path", *COLUMNS["image"], "name", "image_id", "id")
_CELLS = {
    "lists": ("several", r"[^|;]*[|;].*"),
    "whole numbers": ("classes", r"[+-]?\d+"),
    "numbers": (
        "numbers",
        r"[+-]?(\d+[.,]?\d*|[.,]\d+)(e[+-]?\d+)?|[+-]?inf(inity)?|[+-]?nan",
    ),
    "text": ("classes", ".*"),
}
"""What cells are, to what labels are if all cells are so, and a pattern. The first counts."""
_MOST = float(np.finfo(np.float32).max)
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass(frozen=True)
class LabelTable:
    """The labels of images."""

    path: Path
    files: list[str]
    """The files, in the table's order."""
    labels: np.ndarray
    """`(n,)` int32, `(n, k)` uint8 multi-hot, or float32 `(n,)` or `(n, k)`."""
    classes: tuple[str, ...]
    below: dict[str, int]
    """Column to exclusive upper bound, as in `Listing`."""
    splits: list[str] | None
    """The split of each row, "train" or "eval", or `None`."""
    read: tuple[Fact, ...]
    """What was read, for the report."""


class TableRow(NamedTuple):
    """A row and its position, for errors."""

    path: Path
    line: int
    cells: list[str]

    def wrong(self, given: object, expected: str) -> DataError:
        """The error for a row with something other than expected."""
        wrong = "{path}, line {line}: {given!r}: expected {expected}."
        return DataError(
            "table-row", wrong, path=self.path, line=self.line, given=given, expected=expected
        )


def read_table(path: Path, settings: PackSettings = USUAL) -> LabelTable:
    """Reads a table. Raises `DataError` with the line if it cannot be understood."""
    top, *rows = table_rows(path, settings.heading)
    header = top.cells
    if not rows or len(header) < 2:
        raise top.wrong(header, "a heading such as file,label, and a row for each image")
    file_at, split_at, label_at = _roles(top, settings.columns or {})
    files = [row.cells[file_at].replace("\\", "/").removeprefix("./") for row in rows]
    for row, name in zip(rows, files, strict=True):
        if name.startswith("/") or ".." in name.split("/") or not name:
            raise row.wrong(
                name, "a file in its folder, images/1.jpg; numbers alone go into cw.Arrays"
            )
    refuse_duplicates(files, path)
    of = ["train"] if split_at is None else [_split(row, split_at) for row in rows]
    roles, told = evaluated({*of}, settings.eval_split, path)
    splits = None
    if split_at is not None:  # rows of other splits are not read
        kept = [i for i, name in enumerate(of) if name in roles]
        rows, files = [rows[i] for i in kept], [files[i] for i in kept]
        splits = [roles[of[i]] for i in kept]
    names = [header[i] for i in label_at]
    cells = [[row.cells[i] for i in label_at] for row in rows]
    values, classes = _labels(rows, names, cells, settings.labels)
    if splits is not None and "train" in splits and classes and len(names) == 1:
        own = {s: _of(values[np.asarray(splits) == s], classes) for s in {*splits}}
        for split, some in own.items():
            refuse_unknown(f"{split} of {path}", some, sorted(own["train"]))
    below = {"label": len(classes)} if values.dtype == np.int32 else {}
    read = fact(
        "table-read",
        file=header[file_at],
        columns=names,
        kind="classes" if below else "several classes each" if classes else "numbers",
        values=classes or (f"{values.min():g} to {values.max():g}",),
    )
    if left := [h for i, h in enumerate(header) if i not in (file_at, split_at, *label_at)]:
        told.append(fact("columns-left", columns=left))
    return LabelTable(path, files, values, classes, below, splits, (read, *told))


def table_rows(path: Path, heading: str | None = None) -> list[TableRow]:
    """The rows of a `.csv` file that are not empty, as long as the first, which is its `heading`.
    Raises `DataError`."""
    try:
        if other := other_form(path):
            raise other
        with io.TextIOWrapper(open_regular(path), "utf-8-sig", newline="") as stream:
            if os.fstat(stream.fileno()).st_size > _MOST_BYTES:
                raise _too_large(path, "file")
            rows = _read(path, stream)
    except UnicodeDecodeError as error:
        wrong = "{path} is not UTF-8 text ({reason} at byte {byte}): save it as UTF-8."
        raise DataError(
            "table-no-text", wrong, path=path, reason=error.reason, byte=error.start
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
    if heading is not None:
        rows.insert(0, TableRow(path, 0, [name.strip() for name in heading.split(",")]))
    rows = rows or [TableRow(path, 0, [])]
    for row in rows:
        if len(row.cells) != len(rows[0].cells):
            raise row.wrong(row.cells, f"{len(rows[0].cells)} cells")
    return rows


def _roles(heading: TableRow, columns: Mapping[str, str]) -> tuple[int, int | None, list[int]]:
    """The columns of the files, the splits and the labels. Raises `DataError` if the heading names
    none or several, or if it is the first row of a table without one."""
    header = heading.cells
    lower = [name.lower() for name in header]
    named = {
        role: header.index(str(chosen(role, header, columns, heading.path)))
        for role in ("image", "label")
        if role in columns
    }
    file_at = named.get("image", next((lower.index(name) for name in _FILE if name in lower), None))
    if file_at is None:
        raise heading.wrong(
            header,
            "a heading with the column file; for another --columns image=NAME, for a table without "
            "heading --heading file,label",
        )
    if "label" in named:
        label_at = [named["label"]]
    else:
        label_at = [i for i, name in enumerate(lower) if i != file_at and name != "split"]
    if not label_at:
        raise heading.wrong(header, "a column of labels, such as file,label")
    if len({header[i] for i in (file_at, *label_at)}) <= len(label_at):
        raise heading.wrong(header, "another name for each column")
    # Columns without a name, as pandas numbers rows, and those beside a column called label
    numbered = "label" not in named and any(lower[i] in ("", "unnamed: 0") for i in label_at)
    beside = len(label_at) > 1 and any(lower[i] in COLUMNS["label"] for i in label_at)
    if numbered or beside:
        name = next((name for name in header if name.lower() in COLUMNS["label"]), "NAME")
        expected = f"one column of labels: give --columns image={header[file_at]},label={name}"
        raise heading.wrong(header, expected)
    split_at = lower.index("split") if "split" in lower else None
    return file_at, None if split_at in label_at else split_at, label_at


def other_form(path: Path) -> DataError | None:
    """The error for a table in another form than a `.csv` of UTF-8 text with commas, with the
    command that converts it, or `None`."""
    with open_regular(path) as file:
        head = file.read(1 << 12)
    line = head.partition(b"\n")[0].decode("utf-8-sig", "replace")
    by = next((separator for separator in _SEPARATORS if separator in line), "")
    cells = {cell.strip(' "\r').lower() for cell in line.split(by or None)}
    is_csv = path.suffix.lower() == ".csv"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        found = "UTF-16 text"
        command = "iconv -f UTF-16 -t UTF-8"
    elif by not in ("", "," if is_csv else "") and (is_csv or not cells.isdisjoint(_FILE)):
        found = f"a table separated by {_SEPARATORS[by]}"
        command = "cat" if by == "," else f"tr {by!r} ,"
    else:
        return None
    to = path.with_name(f"{path.stem}-new.csv") if is_csv else path.with_suffix(".csv")
    return DataError(
        "table-form",
        path=path,
        found=found,
        command=command,
        source=shlex.quote(str(path)),
        to=shlex.quote(str(to)),
    )


def _read(path: Path, stream: io.TextIOWrapper) -> list[TableRow]:
    """The rows that are not empty. Raises `DataError` for an open quote, and for more than
    `_MOST_BYTES`."""
    reader = csv.reader(stream, strict=True, skipinitialspace=True)
    rows = []
    held = 0
    line = 1
    try:
        for cells in reader:
            row = TableRow(path, line, [cell.strip() for cell in cells])
            if reader.line_num > line:
                long = next(cell for cell in cells if "\n" in cell or "\r" in cell)
                raise row.wrong(long[:60], "cells of one line: close the quote that opens there")
            line += 1
            held += 64 + 8 * len(cells) + sum(50 + len(cell) for cell in row.cells if len(cell) > 1)
            if held > _MOST_BYTES:
                raise _too_large(path, "rows")
            if any(row.cells):
                rows.append(row)
    except csv.Error as error:
        raise DataError("table-no-csv", path=path, line=line, reason=str(error)) from error
    return rows


def _too_large(path: Path, what: str) -> DataError:
    return DataError("table-too-large", path=path, what=what, limit=_MOST_BYTES)


def _split(row: TableRow, column: int) -> str:
    split = row.cells[column].lower()
    if split not in ("train", *EVAL):
        raise row.wrong(row.cells[column], "train or eval")
    return split


def _labels(
    rows: list[TableRow], names: list[str], cells: list[list[str]], labels: str | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The labels, as one of `LABELS`, and the classes."""
    if len(names) == 1:
        values = [nfc(cell) for (cell,) in cells]
        labels = labels or _said(rows, values)
        if labels != "numbers":
            return (_several if labels == "several" else _classes)(rows, values)
    for row, texts in zip(rows, cells, strict=True):
        if (cell := next((cell for cell in texts if not is_number(cell)), None)) is not None:
            expected = "a finite number such as 1.5: leave out the row, or give --labels classes"
            if len(names) > 1:
                expected = (
                    f"numbers, of which there are several columns: {', '.join(names)}; for one of "
                    "classes give --columns label=NAME"
                )
            raise row.wrong(cell, expected)
    if labels == "classes":
        expected = "one column of classes: give --columns label=NAME, or --labels several"
        raise rows[0].wrong(names, expected)
    numbers = np.asarray([[float(cell) for cell in texts] for texts in cells])
    if len(names) == 1:
        return numbers[:, 0].astype(np.float32), ()
    other = ~np.isin(numbers, (0, 1))
    if labels == "numbers" or (labels is None and other.any(axis=0).all()):
        return numbers.astype(np.float32), ()
    if other.any():
        at, column = np.argwhere(other)[0].tolist()
        expected = "0 or 1"
        if labels is None:
            expected += ", as in other columns: give --labels numbers, or --columns label=NAME"
        raise rows[at].wrong(cells[at][column], expected)
    return numbers.astype(np.uint8), tuple(nfc(name) for name in names)


def _said(rows: list[TableRow], values: list[str]) -> str:
    """One of `LABELS`, which all cells of a column say. Raises `DataError` if they differ."""
    kinds = [_kind(value) for value in values]
    (most, _), *others = Counter(kinds).most_common()
    if not others:
        return _CELLS[most][0]
    at = kinds.index(others[-1][0])
    row = rows[at]
    offered = {"one": "several" if "lists" in kinds else "numbers", "other": "classes"}
    raise DataError(
        "table-labels-mixed",
        path=row.path,
        line=row.line,
        given=values[at],
        most=most,
        source=shlex.quote(str(row.path)),
        **offered,
    )


def _classes(rows: list[TableRow], values: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    if "" in values:
        raise rows[values.index("")].wrong("", "a class; --labels several, if there may be none")
    whole = all(_kind(value) == "whole numbers" for value in values)
    classes = tuple(sorted(set(values), key=(lambda v: (float(v), v)) if whole else None))
    number = {name: i for i, name in enumerate(classes)}
    return np.asarray([number[value] for value in values], np.int32), classes


def _of(labels: np.ndarray, classes: Sequence[str]) -> set[str]:
    """The classes that occur in `labels`, `(n,)` or `(n, classes)`."""
    numbers = np.unique(labels) if labels.ndim == 1 else np.flatnonzero(labels.any(axis=0))
    return {classes[i] for i in numbers.tolist()}


def _several(rows: list[TableRow], values: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """The classes in the cells, as `(n, classes)` of 0 and 1."""
    separator = "|" if any("|" in value for value in values) else ";"
    sets = [{part.strip() for part in value.split(separator)} - {""} for value in values]
    classes = tuple(sorted(set().union(*sets)))
    if wrong := [i for i, value in enumerate(values) if separator == "|" and ";" in value]:
        raise rows[wrong[0]].wrong(values[wrong[0]], "one separator in all rows, | or ;")
    number = {name: i for i, name in enumerate(classes)}
    if len(values) * len(classes) > _MOST_BYTES:
        raise _too_large(rows[0].path, "multi-hot labels")
    hot = np.zeros((len(values), len(classes)), np.uint8)
    for row, parts in enumerate(sets):
        hot[row, [number[part] for part in parts]] = 1
    return hot, classes


def _kind(cell: str) -> str:
    """What a cell is, of `_CELLS`."""
    flags = re.ASCII | re.IGNORECASE
    return next(k for k, (_, form) in _CELLS.items() if re.fullmatch(form, cell, flags))


def is_number(text: str) -> bool:
    """Whether a cell is a number that float32 has."""
    try:
        return "_" not in text and text.isascii() and abs(float(text)) <= _MOST
    except ValueError:
        return False
