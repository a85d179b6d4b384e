"""Listings of the entries to pack, before anything is decoded: names, sizes and labels, and a
reader.

Files of images become listings, equal for a folder and its archive:

    SRC/cat/1.jpg, SRC/dog/2.png                                one split, classes by folder
    SRC/train/cat/1.jpg, SRC/val/cat/2.jpg                      train and eval
    SRC.csv                                                     labels from a table

Common parent folders, as in archives, are ignored. Files deeper inside a class's folder belong to
the class.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...base import DataError, Fact, fact, unreadable
from ..class_names import nfc, numbers_of
from ..folder import SUFFIXES, Files, read_file
from ..sources import Columns
from .splits import EVAL, evaluated, refuse_unstated
from .tables import LabelTable


@dataclass(frozen=True)
class Split:
    """The entries of one split, in the order in which they are packed."""

    names: Sequence[str]
    """Unique origins, such as `cat/0123.jpg`."""
    sizes: np.ndarray
    """`(n,)`: the bytes of each file, 0 if unknown."""
    labels: Columns
    """The columns `(n, ...)` that are known already. Others come with the examples."""
    read: Callable[[int], Mapping[str, Any]]
    """`i -> columns of the example`. Its `image` may be encoded bytes, an array or a Pillow
    image."""
    content: str = ""
    """A digest of the contents, if names and sizes are not enough."""
    threads: bool = True
    """Whether `read` is thread-safe."""

    @classmethod
    def numbered(
        cls, n: int, read: Callable[[int], Mapping[str, Any]], labels: Columns, **more: Any
    ) -> Split:
        """`n` entries without names. *Arguments:* `more`: the other fields."""
        return cls(Numbered(n), np.zeros(n, np.int64), labels, read, **more)

    def __len__(self) -> int:
        return len(self.names)

    def only(self, indices: np.ndarray) -> Split:
        """The entries at `indices` `(k,)`, in that order."""
        read = self.read
        return replace(
            self,
            names=[self.names[i] for i in indices],
            sizes=self.sizes[indices],
            labels={name: column[indices] for name, column in self.labels.items()},
            read=lambda i: read(int(indices[i])),
        )

    def fingerprint(self) -> str:
        """SHA-256 of names, sizes, labels and content."""
        digest = hashlib.sha256(f"{len(self)} entries {self.content}\n".encode())
        for name, size in zip(self.names, self.sizes.tolist(), strict=True):
            digest.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
        for name, column in sorted(self.labels.items()):
            digest.update(f"{name} {column.dtype.str} {column.shape}\n".encode())
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()


class Numbered(Sequence):
    """Names "0000", "0001", ... for `n` entries without names."""

    def __init__(self, n: int):
        self.n = n
        self.width = len(str(max(n - 1, 0)))

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return f"{index:0{self.width}}"


@dataclass(frozen=True)
class Listing:
    """The entries to pack, with their classes."""

    splits: Mapping[str, Split]
    """Split to its entries."""
    names: tuple[str, ...] = ()
    """The names of the classes."""
    below: Mapping[str, int] = field(default_factory=dict)
    """Column to the exclusive upper bound of its values."""
    left_out: tuple[str, ...] = ()
    """Files without the suffix of an image, and other things that are not packed, for the
    report."""
    texts: Mapping[str, Any] = field(default_factory=dict)
    """The tokens with which a document begins and ends, for the manifest."""
    beside: Mapping[str, bytes] = field(default_factory=dict)
    """Files beside the splits of the pack: name to content."""
    told: tuple[Fact, ...] = ()
    """How the source was understood, for the report."""

    @classmethod
    def classified(
        cls, splits: Mapping[str, Split], classes: tuple[str, ...], *told: Fact, origin: str
    ) -> Listing:
        """Entries with a label of one of `classes`, if there are any. *Arguments:* `origin`: what
        names them, for the report."""
        read = [fact("classes-read", classes=len(classes), origin=origin, names=classes)]
        if not classes:
            read = [fact("labels-read", kind=kind) for kind in _kinds(splits)]
        below = {"label": len(classes)} if classes else {}
        return cls(splits, classes, below, told=(*told, *read))


def _kinds(splits: Mapping[str, Split]) -> list[str]:
    """The kind of labels that are no classes: "float32[]"."""
    labels = [one.labels["label"] for one in splits.values() if "label" in one.labels]
    return sorted({f"{label.dtype}{list(label.shape[1:])}" for label in labels})


def divided(listing: Listing, share: float) -> Listing:
    """`listing` with `share` of each class of its one split moved to `eval`.

    In a class with `n` entries, the `round(n * share)` names with the smallest SHA-256 are moved.
    They are the same on every machine, and for a folder and its archive. Entries without an integer
    label, or whose label comes with the example, are one class.
    """
    if set(listing.splits) != {"train"}:
        raise DataError("split-twice", share=share, splits=list(listing.splits))
    whole = listing.splits["train"]
    label = whole.labels.get("label")
    known = label is not None and label.ndim == 1 and label.dtype.kind in "iu"
    if label is None or not known:
        label = np.zeros(len(whole), np.int32)
    keys = [
        hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() for name in whole.names
    ]
    held_out = np.zeros(len(whole), bool)
    order = np.argsort(label, kind="stable")
    for alike in np.split(order, np.flatnonzero(np.diff(label[order])) + 1):
        rows = sorted(alike.tolist(), key=keys.__getitem__)
        held_out[rows[: int(len(rows) * share + 0.5)]] = True
    if held_out.all() or not held_out.any():
        empty = "train" if held_out.all() else "eval"
        raise DataError("split-empty", share=share, examples=len(whole), empty=empty)
    splits = {
        "train": whole.only(np.flatnonzero(~held_out)),
        "eval": whole.only(np.flatnonzero(held_out)),
    }
    of_all = [fact("split-of-all", **{name: len(split) for name, split in splits.items()})]
    told = _of_each(listing.names, label, held_out) if known else of_all
    return replace(listing, splits=splits, told=(*listing.told, *told))


def _of_each(names: Sequence[str], label: np.ndarray, held_out: np.ndarray) -> Iterator[Fact]:
    """Yields what a report says of the number of examples of each class on both sides."""
    numbers, of = np.unique(label, return_inverse=True)
    sides = {"train": ~held_out, "eval": held_out}
    counts = {side: np.bincount(of[rows], minlength=len(numbers)) for side, rows in sides.items()}
    spans = {side: [int(n.min()), int(n.max())] for side, n in counts.items()}
    yield fact("split-of-each", classes=len(numbers), **spans)
    for side, each in counts.items():
        if none := [names[i] if names else str(i) for i in numbers[each == 0].tolist()]:
            yield fact("split-without", side=side, classes=none)


_ENDINGS = sorted(SUFFIXES)


class _Rows(NamedTuple):
    """The files of a split."""

    rows: list[int]
    """Their rows in the list of all files."""
    cut: int
    """The number of parts to cut off their paths."""


def arrange(where: Path, files: Files, eval_split: str | None = None) -> Listing:
    """Arranges `files` in splits, with labels by folder. The classes are those of `train`,
    sorted. *Arguments:* `eval_split`: as in `PackSettings`."""
    if not files.paths:
        wrong = "{path} holds no images: expected {path}/<class>/<file> of {endings:list}."
        raise DataError("folder-no-images", wrong, path=where, endings=_ENDINGS)
    above = _above(files.paths)
    paths = [path[above:] for path in files.paths]
    splits, ignored, told = _splits(where, paths, eval_split)
    _check_folders(where, files, splits, above)
    # By class, then file; "a-b/1" sorts before "a/1" as text, but its class comes after
    for rows, cut in splits.values():
        rows.sort(key=lambda row: (nfc(paths[row][cut]), "/".join(paths[row][cut + 1 :])))
    classes = tuple(sorted({nfc(paths[row][splits["train"].cut]) for row in splits["train"].rows}))
    numbers = {name: number for number, name in enumerate(classes)}
    entries = {}
    for split, (rows, cut) in splits.items():
        of = [nfc(paths[row][cut]) for row in rows]
        numbers_of(classes, sorted(set(of)), f"{split} of {where}")
        entries[split] = Split(
            names=["/".join(paths[row][cut:]) for row in rows],
            sizes=np.asarray([files.sizes[row] for row in rows], np.int64),
            labels={"label": np.asarray([numbers[name] for name in of], np.int32)},
            # Which can be pickled
            read=partial(_image, files.read, [files.keys[row] for row in rows]),
        )
    made = Listing.classified(entries, classes, *told, origin="folders")
    return replace(made, left_out=(*ignored, *files.left_out))


def listed_by(table: LabelTable) -> Listing:
    """The files named in a table, relative to it, in its order."""
    root = table.path.parent
    sizes = []
    missing = []
    for name in table.files:
        try:
            status = os.stat(root / name)
        except (FileNotFoundError, ValueError):  # a name with a zero byte is invalid
            missing.append(name)
            continue
        except OSError as error:
            raise unreadable(root / name, error) from error
        if not stat.S_ISREG(status.st_mode):  # reading a pipe might never end
            wrong = "{table} names {name}, which is not a regular file: leave out the row."
            raise DataError("table-irregular-file", wrong, table=table.path, name=name)
        sizes.append(status.st_size)
    if missing:
        endings = (ending for ending in _ENDINGS if os.path.isfile(root / (missing[0] + ending)))
        if (ending := next(endings, None)) is not None:
            facts = {"table": table.path, "name": missing[0], "ending": ending}
            raise DataError("table-names-no-suffix", **facts)
        facts = {"table": table.path, "count": len(missing), "names": missing}
        raise DataError("table-files-absent", root=root, **facts)
    keys = [str(root / name) for name in table.files]
    whole = Split(
        table.files,
        np.asarray(sizes, np.int64),
        {"label": table.labels},
        partial(_image, read_file, keys),
    )
    if table.splits is None:
        return Listing({"train": whole}, table.classes, table.below, told=table.read)
    of = np.asarray(table.splits)
    splits = {
        name: whole.only(np.flatnonzero(of == name))
        for name in sorted({*table.splits}, reverse=True)
    }
    return Listing(splits, table.classes, table.below, told=table.read)


def _image(read: Callable[[Any], bytes], keys: list[Any], i: int) -> Mapping[str, Any]:
    return {"image": read(keys[i])}


def _above(paths: Sequence[tuple[str, ...]]) -> int:
    """The number of common parent folders of all files. A class and a file of each path always
    remain."""
    above = 0
    while all(len(path) > above + 2 and path[above] == paths[0][above] for path in paths):
        above += 1
    return above


def _splits(
    where: Path, paths: list[tuple[str, ...]], eval_split: str | None
) -> tuple[dict[str, _Rows], list[str], tuple[Fact, ...]]:
    """The splits, by `train` beside one of `EVAL` or the one that is named, the folders left out,
    and what a report says."""
    tops: dict[str, list[int]] = {}
    for row, path in enumerate(paths):
        tops.setdefault(path[0] if len(path) > 1 else "", []).append(row)
    there = ["train", *(name for name in (*EVAL, eval_split) if name in tops)]
    # Classes may also be called train and test: then there are no deeper folders
    whole = "" in tops or not any(len(paths[row]) >= 3 for row in tops.get("train", ()))
    if not whole and there == ["train"]:
        refuse_unstated(where, {*tops} - {"train"})
    if whole or there == ["train"]:
        evaluated(["train"], eval_split, where)  # refuses one that is named
        return {"train": _Rows(list(range(len(paths))), 0)}, [], ()
    roles, told = evaluated(there, eval_split, where)
    ignored = [f"{name}/" for name in sorted(tops) if name not in roles]
    return {role: _Rows(tops[name], 1) for name, role in roles.items()}, ignored, tuple(told)


def _check_folders(where: Path, files: Files, splits: Mapping[str, _Rows], above: int) -> None:
    """Raises `DataError` unless every image is in a class's folder, and every such folder has an
    image."""
    for rows, cut in splits.values():
        start = above + cut
        outside = ["/".join(files.paths[row]) for row in rows if len(files.paths[row]) < start + 2]
        if outside:
            raise DataError("folder-images-outside", path=where, names=outside)
        root = files.paths[rows[0]][:start]
        classes = {files.paths[row][start] for row in rows}
        for folder in files.folders:
            if len(folder) == start + 1 and folder[:start] == root and folder[start] not in classes:
                raise DataError(
                    "class-folder-empty",
                    folder="/".join(folder),
                    path=where,
                    endings=_ENDINGS,
                )
