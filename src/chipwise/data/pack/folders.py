"""Lists of image files to splits, classes and labels: the same for a folder and for an archive of it.

    SRC/cat/1.jpg, SRC/dog/2.png                                one split, classes by folder
    SRC/train/cat/1.jpg, SRC/val/cat/2.jpg                      train and eval
    SRC/1.jpg, SRC/2.jpg with a table, or a pattern for names   labels from elsewhere

Folders above all of it, as archives have them, do not count. Files deeper inside a class's folder belong to
it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError, RecipeError
from ...words.figures import few
from ..files import SUFFIXES, Files, read_file
from .entries import Listing, Split
from .tables import Table

EVAL = ("eval", "val", "valid", "validation", "test")  # of several, the first is taken


def arrange(where: Path, files: Files, labels: str | Table = "folders", archive: bool = False) -> Listing:
    """`files` as splits with labels.

    `labels`: "folders", a table, or a regular expression whose first group, or the one named `label`, is the
    class.
    """
    if not files.paths:
        raise DataError(
            f"{where} holds no images: expected {where}/<class>/<file>, with names ending in "
            f"{', '.join(sorted(SUFFIXES))}."
        )
    by_folder = labels == "folders"
    above = _above(files.paths, 2) if by_folder else _above(files.paths, 1) if archive else 0
    if isinstance(labels, Table) and {"/".join(path) for path in files.paths} & set(labels.files):
        above = 0  # the table writes the names in full
    paths = [path[above:] for path in files.paths]
    found, notes = _splits(paths, 3 if by_folder else 2)
    if by_folder:
        _check_folders(where, files, found, above)
    names = {split: ["/".join(paths[i][cut:]) for i in rows] for split, (rows, cut) in found.items()}
    for split, (rows, _) in found.items():
        order = sorted(range(len(rows)), key=_order(names[split], by_folder))
        names[split] = [names[split][k] for k in order]
        found[split] = ([rows[k] for k in order], found[split][1])
    if isinstance(labels, Table):
        if labels.splits is not None and len(found) > 1:
            raise DataError(
                f"{labels.path} has a column split, but {where} is split by its folders already: remove the "
                f"column, or give one of the folders as SRC."
            )
        whole = {split: ["/".join(paths[i]) for i in rows] for split, (rows, _) in found.items()}
        columns, classes, below = _by_table(where, whole, labels)
    else:
        pattern = None if by_folder else _pattern(labels)
        columns, classes, below = _by_class(where, names, pattern)
    splits = {
        split: Split(
            names=names[split],
            sizes=np.asarray([files.sizes[i] for i in rows], np.int64),
            labels={"label": columns[split]},
            read=_reader(files.read, [files.keys[i] for i in rows]),
        )
        for split, (rows, _) in found.items()
    }
    undivided = "give one of its folders as SRC"
    if isinstance(labels, Table) and labels.splits is not None:
        of = dict(zip(labels.files, labels.splits, strict=True))
        splits = _sent(splits["train"], [of[name] for name in whole["train"]])
        undivided = _without(labels)
    return Listing(splits, classes, below, (*notes, *files.left_out), undivided)


def rows_of(table: Table) -> Listing:
    """The files that a table names, beside it, in its order."""
    root = table.path.parent
    sizes = []
    for name in table.files:
        try:
            status = os.stat(root / name)
            if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for without end
                raise DataError(f"{table.path} names {name}, which is no regular file: remove the row.")
            sizes.append(status.st_size)
        except FileNotFoundError:
            sizes.append(-1)
        except OSError as error:
            raise DataError(f"Cannot read {root / name}: {error.strerror or error}.") from error
    absent = [name for name, size in zip(table.files, sizes, strict=True) if size < 0]
    if absent:
        raise DataError(
            f"{table.path} names {len(absent):,} files that are not there ({few(absent)}): remove the rows, "
            f"or give the files' paths from {root}."
        )
    keys = [str(root / name) for name in table.files]
    whole = Split(table.files, np.asarray(sizes, np.int64), {"label": table.labels}, _reader(read_file, keys))
    if table.splits is None:
        return Listing({"train": whole}, table.classes, table.below)
    return Listing(_sent(whole, table.splits), table.classes, table.below, (), _without(table))


def _sent(whole: Split, splits: Sequence[str]) -> dict[str, Split]:
    """The entries of `whole` by split, where the column `split` of a table sends each."""
    of = np.asarray(splits)
    return {split: whole.only(np.flatnonzero(of == split)) for split in sorted(set(splits))[::-1]}


def _without(table: Table) -> str:
    return f"remove the column split of {table.path}"


def _reader(read: Callable[[Any], bytes], keys: list[Any]) -> Callable[[int], Mapping[str, Any]]:
    return lambda i: {"image": read(keys[i])}


def _order(names: list[str], by_folder: bool) -> Callable[[int], Any]:
    """By class, then file; "a-b/1" sorts before "a/1" as text, but its class comes after."""
    return lambda k: names[k].split("/", 1) if by_folder else names[k]


def _above(paths: Sequence[tuple[str, ...]], keep: int) -> int:
    """Folders that all files share and that say nothing; `keep` parts of each path always stay."""
    above = 0
    while all(len(path) > above + keep and path[above] == paths[0][above] for path in paths):
        above += 1
    return above


def _splits(paths: list[tuple[str, ...]], depth: int) -> tuple[dict[str, tuple[list[int], int]], list[str]]:
    """Split to (rows, parts to cut off), and folders left out: by `train` beside one of `EVAL`."""
    tops: dict[str, list[int]] = {}
    for row, path in enumerate(paths):
        tops.setdefault(path[0] if len(path) > 1 else "", []).append(row)
    other = [name for name in EVAL if name in tops]
    # Classes may be called train and test, too: then nothing lies deeper
    if "" in tops or not other or not any(len(paths[row]) >= depth for row in tops.get("train", ())):
        return {"train": (list(range(len(paths))), 0)}, []
    notes = [f"{name}/" for name in sorted(tops) if name not in ("train", other[0])]
    return {"train": (tops["train"], 1), "eval": (tops[other[0]], 1)}, notes


def _check_folders(where: Path, files: Files, found: Mapping[str, tuple[list[int], int]], above: int) -> None:
    """Every image lies in a class's folder, and every class's folder holds an image."""
    for rows, cut in found.values():
        start = above + cut
        outside = ["/".join(files.paths[i]) for i in rows if len(files.paths[i]) < start + 2]
        if outside:
            raise DataError(
                f"{where} has images outside any class's folder ({few(outside)}): expected <class>/<file>. "
                f"For labels from a table give --labels labels.csv, from the files' names --labels REGEX."
            )
        root = files.paths[rows[0]][:start]
        classes = {files.paths[i][start] for i in rows}
        for folder in files.folders:
            if len(folder) == start + 1 and folder[:start] == root and folder[start] not in classes:
                raise DataError(
                    f"The class folder '{'/'.join(folder)}' of {where} holds no images: remove it, or add "
                    f"files ending in {', '.join(sorted(SUFFIXES))}."
                )


def _pattern(text: str) -> re.Pattern:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise RecipeError(
            f"--labels {text}: expected folders, a .csv file or a regular expression ({error})."
        ) from error
    if not pattern.groups:
        raise RecipeError(
            f"--labels {text} has no group: put the part that is the class in brackets, such as '^([a-z]+)_'."
        )
    return pattern


def _by_class(where: Path, names: Mapping[str, list[str]], pattern: re.Pattern | None):
    """Labels by folder, or by `pattern`; classes are those of `train`, sorted."""
    found: dict[str, list[str]] = {}
    for split, listed in names.items():
        if pattern is None:
            found[split] = [name.split("/", 1)[0] for name in listed]
            continue
        hits = [pattern.search(name) for name in listed]
        group = "label" if "label" in pattern.groupindex else 1
        given = [hit.group(group) if hit else None for hit in hits]
        lost = [name for name, value in zip(listed, given, strict=True) if value is None]
        if lost:
            raise DataError(
                f"--labels {pattern.pattern} matches nothing in {len(lost):,} of {where}: {few(lost)}."
            )
        found[split] = [value for value in given if value is not None]
    classes = tuple(sorted(set(found["train"])))
    numbers = {name: number for number, name in enumerate(classes)}
    for split, values in found.items():
        unknown = sorted(set(values) - set(numbers))
        if unknown:
            raise DataError(
                f"{where} has classes in {split} that train lacks: {few(unknown)}; train has {few(classes)}."
            )
    columns = {split: np.asarray([numbers[v] for v in values], np.int32) for split, values in found.items()}
    return columns, classes, {"label": len(classes)}


def _by_table(where: Path, names: Mapping[str, list[str]], table: Table):
    rows = {name: row for row, name in enumerate(table.files)}
    lost = [name for listed in names.values() for name in listed if name not in rows]
    there = {name for listed in names.values() for name in listed}
    absent = [name for name in table.files if name not in there]
    if lost:
        raise DataError(
            f"{table.path} has no row for {len(lost):,} images of {where} ({few(lost)}): add rows, or "
            f"remove the images; its rows begin {few(table.files)}."
        )
    if absent:
        raise DataError(
            f"{table.path} names {len(absent):,} files that {where} lacks ({few(absent)}): remove the rows."
        )
    columns = {split: table.labels[[rows[name] for name in listed]] for split, listed in names.items()}
    return columns, table.classes, table.below
