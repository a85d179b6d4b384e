"""Recognises SRC: a folder, a table, an archive, files of rows, or a Python object."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...base import DataError
from ...recipe.source import kind_of, number_of_classes, unmasked
from .. import remote
from ..class_names import Renamed, joined, names_of, unjoined
from ..folder import TARS, list_tar, walk
from ..sources import Arrays, Columns, Lazy, check_labels
from .folders import Listing, Split, arrange, listed_by
from .hub import files_at, from_datasets, from_hub, from_parquet, on_hub
from .pack_settings import USUAL, PackSettings
from .splits import evaluated
from .tables import other_form, read_table
from .tfrecord import from_tfrecords

_RENAMED = {"img": "image", "images": "image", "labels": "label"}


def listing_of(src: Any, settings: PackSettings = USUAL) -> Listing:
    """The entries of `src`, whatever its kind. A URL is fetched.

    Raises `DataError` if it cannot be packed.
    """
    if on_hub(src):
        src = from_hub(src)
    if not isinstance(src, (str, os.PathLike)):
        return from_objects(src, settings)
    path = remote.local(src if isinstance(src, str) else Path(src))
    if path.name in ("", ".."):
        path = path.resolve()  # "." in a message looks like the end of a sentence
    with DataError.of_system("unreadable", path=path):
        if not path.exists():
            raise DataError("pack-source-missing", path=path)
        if (rows := files_at(path)) is not None:
            kind, found = rows
            read = from_tfrecords if kind == "tfrecord" else from_parquet
            return read(found, settings)
        if path.is_dir():
            return arrange(path, walk(path), settings.eval_split)
        other = other_form(path) if path.is_file() else None
    if path.name.lower().endswith(".csv"):
        return listed_by(read_table(path, settings))
    if path.name.lower().endswith(TARS):
        return arrange(path, list_tar(path), settings.eval_split)
    raise other or DataError("pack-source-unknown", path=path)


def has_rows(src: Any) -> bool:
    """Whether the labels of `src` are a column of rows: of Parquet, TFRecord or `datasets`."""
    if isinstance(src, (str, os.PathLike)):
        return on_hub(src) or files_at(remote.local(str(src))) is not None
    sources = src.values() if isinstance(src, Mapping) else [src]
    return all(hasattr(source, "cast_column") for source in sources)


def from_objects(sources: Any, settings: PackSettings) -> Listing:
    """The entries of any object with `len` and `[i]`, or of a dict of them by split (`train`, and
    `test` or similar).

    An example is a dict of columns or a pair (image, label). The classes are `settings.names`, by
    default those of `train`. Labels of an object that states its own are joined to them by name.
    Raises `DataError` for other classes.
    """
    named = sources if isinstance(sources, Mapping) else {"train": sources}
    if "train" not in named:
        raise DataError("objects-by-split", splits=list(named))
    roles, told = evaluated(list(named), settings.eval_split, "The data")
    by_split = {role: named[name] for name, role in roles.items()}
    if all(hasattr(source, "cast_column") for source in by_split.values()):
        kind = type(sources).__name__
        return from_datasets(by_split, settings, kind, {}, told)
    splits = {}
    names = settings.names
    known = tuple(names) or names_of(by_split["train"])
    classes = known
    for split, source in by_split.items():
        source = joined(known, source)
        own_classes, labels = _labels(source)
        if (numbered := unjoined(classes, names_of(source), names, split)) is not None:
            told.append(numbered)
        classes = classes or own_classes
        column = _column(source)
        stated = classes or number_of_classes(source)
        if settings.split is not None and stated and column is not None:  # of each class then
            labels = {"label": column}
        splits[split] = _of_object(source, labels)
    origin = "names=" if names else "the source"
    listing = Listing.classified(splits, classes, *told, origin=origin)
    for split, entries in splits.items():
        check_labels(entries.labels, listing.below.get("label"), f"{split}:")
    return listing


def _labels(source: Any) -> tuple[tuple[str, ...], Columns]:
    """Classes and labels, if they are available without reading examples."""
    classes = getattr(source, "names", None) or getattr(source, "classes", None)
    if isinstance(classes, int):
        classes = tuple(map(str, range(classes)))
    if not (isinstance(classes, (list, tuple)) and all(isinstance(name, str) for name in classes)):
        classes = ()
    for attribute in ("labels", "targets"):  # chipwise's ImageFolder, torchvision's data sets
        values = getattr(source, attribute, None)
        one_each = values is not None and np.shape(values) == (len(source),)
        if one_each and np.asarray(values).dtype.kind in "iu":
            return tuple(classes), {"label": np.asarray(values, np.int32)}
    return tuple(classes), {}


def _column(source: Any) -> np.ndarray | None:
    """The labels of arrays, `(n,)` or of another shape."""
    if isinstance(source, Renamed):
        return None if (own := _column(source.source)) is None else source.join(own)
    return source.columns.get("label") if isinstance(source, Arrays | Lazy) else None


def _of_object(source: Any, labels: Columns) -> Split:
    kind = kind_of(source).__name__
    join = None
    if isinstance(source, Renamed):  # its examples as they are, as images may be encoded
        source, join = source.source, source.join
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        wrong = "A {kind} cannot be packed: expected a path, or an object with len() and [i]."
        raise DataError("object-no-source", wrong, kind=kind)
    n = len(source)

    def read(index: int) -> dict[str, Any]:
        example = source[index]
        if isinstance(example, (tuple, list)) and len(example) == 2:
            example = dict(zip(("image", "label"), example, strict=True))
        if not isinstance(example, Mapping) or not example:
            raise DataError("object-example", index=index, source=kind, kind=type(example).__name__)
        example = {
            str(_RENAMED.get(name, name)): unmasked(str(name), value)
            for name, value in example.items()
        }
        if join is not None and "label" in example:
            example["label"] = join(np.asarray([example["label"]]))[0]
        return example

    # Content is only sampled, so a change of the object between a kill and the next call may be
    # missed
    digest = hashlib.sha256(kind.encode())
    for index in sorted({0, n // 2, n - 1}) if n else ():
        try:
            example = read(index)
        except OSError:  # it will be skipped later, with its reason
            continue
        for name, value in sorted(example.items()):
            content = value if isinstance(value, bytes) else np.asarray(value).tobytes()
            digest.update(name.encode() + content)
    return Split.numbered(n, read, labels, content=digest.hexdigest(), threads=False)
