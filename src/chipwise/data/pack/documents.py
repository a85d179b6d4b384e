"""Reads texts from files, folders and tables in pieces; memory holds one piece."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import DataError, unreadable
from .rows import chosen, files_at, parquet, reading, split_of
from .tables import EVAL

ENDINGS = (".txt", ".md", ".text")
_PIECE = 1 << 20  # bytes of a piece of a document, which ends at a line break

_LINE = 1 << 28  # at most: bytes of a line of JSON, and characters of a table's cell


class Document(NamedTuple):
    """A text in `pieces`, with its split, its origin, and its label or `None`."""

    split: str
    name: str
    label: Any
    pieces: Iterable[bytes]


def is_text(path: Path) -> bool:
    """Whether a file has the suffix of text."""
    return path.suffix.lower() in (*ENDINGS, ".jsonl")


def documents(path: Path, columns: dict[str, str], each: bool) -> Iterator[Document]:
    """Yields the documents at `path`; see `text_listing`."""
    ending = path.suffix.lower()
    try:
        if not path.exists():
            raise DataError("pack-source-missing", path=path)
        if path.is_dir() and (rows := files_at(path)) is not None and rows[0] == "parquet":
            for file in rows[1]:
                yield from _rows(file, columns, _parquet_rows(file, columns))
        elif path.is_dir():
            yield from _files(path, each)
        elif ending == ".parquet":
            yield from _rows(path, columns, _parquet_rows(path, columns))
        elif ending == ".jsonl":
            yield from _rows(path, columns, _json_lines(path))
        elif ending == ".csv":
            yield from _rows(path, columns, _csv_lines(path))
        else:
            yield Document("train", path.name, None, _pieces(path))
    except OSError as error:
        raise unreadable(path, error) from error


def _files(path: Path, each: bool) -> Iterator[Document]:
    """The text files of a folder, at any depth; `train/` with `test/` or similar are splits, and with `each`
    the next folder is the class."""
    files = sorted(
        (Path(folder) / name).relative_to(path)
        for folder, _, names in os.walk(path)
        for name in names
        if name.lower().endswith(ENDINGS) and (Path(folder) / name).is_file()
    )
    tops = {file.parts[0] for file in files if len(file.parts) > 1}
    other = next((name for name in EVAL if name in tops), None) if "train" in tops else None
    for file in files:
        split, inner = "train", file.parts
        if other is not None:
            if file.parts[0] not in ("train", other):
                continue
            split, inner = "eval" if file.parts[0] == other else "train", file.parts[1:]
        if each and len(inner) < 2:
            raise DataError("text-without-class", path=path, name=str(file))
        yield Document(split, str(file), inner[0] if each else None, _pieces(path / file))


def _pieces(path: Path) -> Iterator[bytes]:
    """A file in pieces that end at a line break, unless a line is longer than a piece."""
    rest = b""
    with open(path, "rb") as file:
        while block := file.read(_PIECE):
            whole, newline, after = (rest + block).rpartition(b"\n")
            if newline:
                yield whole + newline
                rest = after
            else:
                rest = after
                if len(rest) >= 16 * _PIECE:
                    end = len(rest) - next((i for i in (1, 2, 3) if rest[-i] >= 0xC0), 0)
                    yield rest[:end]  # without a truncated character at the end
                    rest = rest[end:]
    if rest:
        yield rest


def _rows(path: Path, columns: dict[str, str], rows: Iterator[dict[str, Any]]) -> Iterator[Document]:
    text: str | None = None
    label: str | None = None
    for number, row in enumerate(rows):
        if text is None:
            there = [name for name in row if name is not None]  # the cells of a table, without its header
            text, label = (chosen(role, there, columns, path) for role in ("text", "label"))
            if text is None:
                raise DataError("text-column", path=path, columns=there)
        value = row.get(text)
        if not isinstance(value, str):
            raise DataError("text-row", path=path, row=number, column=text, kind=type(value).__name__)
        try:
            piece = value.encode()
        except UnicodeEncodeError as error:
            raise DataError("text-surrogate", path=path, row=number, column=text) from error
        yield Document(split_of(path.name), f"{path.name}/{number}", row.get(label or ""), [piece])


def _parquet_rows(path: Path, columns: dict[str, str]) -> Iterator[dict[str, Any]]:
    with parquet(path) as file:
        there = file.schema_arrow.names
        taken = [name for role in ("text", "label") if (name := chosen(role, there, columns, path))]
        batches = file.iter_batches(1024, columns=taken or there)
        while True:
            with reading(path):
                if (batch := next(batches, None)) is None:
                    return
                rows = batch.to_pylist()
            yield from rows


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    offset = 0
    with open(path, "rb") as file:
        while line := file.readline(_LINE):
            if len(line) == _LINE:
                raise DataError("text-line-long", path=path, offset=offset, most=_LINE)
            try:
                row = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError) as error:
                raise DataError("text-line", path=path, offset=offset, reason=str(error)[:160]) from error
            if row is not None:
                if not isinstance(row, dict):
                    raise DataError("text-line", path=path, offset=offset, reason=type(row).__name__)
                yield row
            offset += len(line)


def _csv_lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader, before = csv.DictReader(file), csv.field_size_limit(_LINE)  # its own is 128 KiB
        try:
            yield from reader
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError("table-no-csv", path=path, reason=str(error)[:160]) from error
        finally:
            csv.field_size_limit(before)
