"""Reads texts from files, folders and tables in pieces. Memory contains one piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...base import DataError, Fact, Say, silent
from ..folder import DEEPEST, TARS, is_litter
from .columns import chosen, reading
from .hub import files_at, from_hub, text_rows
from .splits import EVAL, evaluated, refuse_unstated, split_in, splits_of

ENDINGS = (".txt", ".md", ".text")
_PIECE = 1 << 20  # bytes of a piece of a document, which ends at a line break


class Document(NamedTuple):
    """A text in `pieces`, with its split and its origin, and the `prompt` that it answers, if
    any."""

    split: str
    name: str
    pieces: Iterable[bytes]
    prompt: bytes = b""


def is_text(path: Path) -> bool:
    """Whether a file has the suffix of text."""
    return path.suffix.lower() in (*ENDINGS, ".jsonl")


def documents(
    path: Path | str,
    columns: dict[str, str],
    eval_split: str | None = None,
    say: Say = silent,
    left_out: list[str] | None = None,
) -> Iterator[Document]:
    """Yields the documents at `path`, or of a data set of the Hub. See `text_listing`.
    *Arguments:* `say`: called with what a report says. `left_out`: gets the files of a folder that
    are not read."""

    told: list[Fact] = []
    left_out = [] if left_out is None else left_out

    def say_once(some: Iterable[Fact]) -> None:
        for one in some:
            if one not in told:
                told.append(one)
                say(one)

    def roles_of(there: Iterable[str]) -> dict[str, str]:
        roles, read = evaluated(list(there), eval_split, path)
        say_once(read)
        return roles

    if isinstance(path, str):
        splits = from_hub(path)
        for name, split in roles_of(splits).items():
            yield from _rows(path, splits[name], split, columns, say_once)
        return
    ending = path.suffix.lower()
    with DataError.of_system("unreadable", path=path):
        if not path.exists():
            raise DataError("pack-source-missing", path=path)
        if path.is_dir() and (rows := files_at(path)) is not None and rows[0] == "parquet":
            stated = splits_of(rows[1], eval_split)
            roles = roles_of({*stated.values()})
            for file, name in stated.items():
                if name in roles:
                    yield from _rows(file, text_rows(file), roles[name], columns, say_once)
        elif path.is_dir():
            files = _files(path, left_out)
            stated = _stated(path, files, eval_split)
            roles = roles_of({"train", *stated.values()} - {""})
            for file in files:
                if (role := roles.get(stated[file])) is None:
                    left_out.append(str(file))
                elif file.suffix.lower() == ".jsonl":
                    rows_of = text_rows(path / file)
                    yield from _rows(path / file, rows_of, role, columns, say_once)
                else:
                    yield Document(role, str(file), _pieces(path / file))
        elif ending in (".parquet", ".jsonl", ".csv"):
            (split,) = roles_of(splits_of([path], eval_split).values()).values()
            yield from _rows(path, text_rows(path), split, columns, say_once)
        elif path.name.lower().endswith(TARS):
            raise DataError(
                "text-archive", "{path} is an archive: unpack it, and pack its text.", path=path
            )
        else:
            roles_of(["train"])
            yield Document("train", path.name, _pieces(path))


def _files(path: Path, left_out: list[str]) -> list[Path]:
    """The text files of a folder, sorted. `left_out` gets the others."""
    files = []
    for folder, below, names in os.walk(path):
        here = Path(folder).relative_to(path)
        if below and len(here.parts) >= DEEPEST:
            wrong = "{path} has folders more than {deep} deep: pack those below."
            raise DataError("folder-too-deep", wrong, path=path, deep=DEEPEST)
        below[:] = [name for name in below if not is_litter(name)]
        for file in (here / name for name in names if not is_litter(name)):
            if is_text(file) and (path / file).is_file():
                files.append(file)
            else:
                left_out.append(str(file))
    return sorted(files)


def _stated(path: Path, files: list[Path], given: str | None) -> dict[Path, str]:
    """The split of each of `files` in a folder, "" for none: its top folder, if there is `train/`,
    else what its name states, if names state "train" and another. Raises `DataError` for others
    beside these."""
    tops = {file.parts[0] for file in files if len(file.parts) > 1}
    if "train" in tops:
        if tops.isdisjoint((*EVAL, given)):
            refuse_unstated(path, tops - {"train"})
        known = {"train", *EVAL, given}
        return {file: file.parts[0] if file.parts[0] in known else "" for file in files}
    named = {file: split_in(file.name, given) for file in files}
    if not {"train"} < {*named.values()} - {None}:
        return dict.fromkeys(files, "train")
    refuse_unstated(path, [str(file) for file, split in named.items() if split is None])
    return {file: split or "" for file, split in named.items()}


def _pieces(path: Path) -> Iterator[bytes]:
    """Yields a file in pieces that end at a line break, unless a line is longer than a piece."""
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


def _rows(
    path: Any,
    rows: Iterable[Mapping[str, Any]],
    split: str,
    columns: dict[str, str],
    say: Callable[[Iterable[Fact]], None],
) -> Iterator[Document]:
    roles: dict[str, str] = {}
    for number, row in enumerate(rows):
        if not roles:
            there = list(row)
            found = {role: chosen(role, there, columns, path) for role in ("text", "prompt")}
            roles = {role: column for role, column in found.items() if column is not None}
            if "text" not in roles:
                raise DataError("text-column", path=path, columns=there)
            say(reading(roles, (), {*there} - {*roles.values()}))
        read = {
            role: _cell(path, number, column, row.get(column)) for role, column in roles.items()
        }
        name = f"{getattr(path, 'name', split)}/{number}"
        yield Document(split, name, [read["text"]], read.get("prompt", b""))


def _cell(path: Any, number: int, column: str, value: Any) -> bytes:
    if not isinstance(value, str):
        wrong = "{path}, row {row}: {column:plain} is {kind}, expected text."
        raise DataError(
            "text-row", wrong, path=path, row=number, column=column, kind=type(value).__name__
        )
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        wrong = "{path}, row {row}: {column:plain} holds half of a surrogate pair: correct it."
        raise DataError("text-surrogate", wrong, path=path, row=number, column=column) from error
