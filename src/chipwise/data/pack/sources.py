"""What SRC is: a folder, a table, an archive, a published data set's files, or an object."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import DataError
from .. import remote
from ..files import list_tar, walk
from .arrays import cifar_classes, from_cifar, from_idx, from_objects, idx_files
from .entries import Listing
from .folders import arrange, rows_of
from .tables import Table, read_table

_TARS = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2")
_TABLES = (".csv",)


def listing_of(src: Any, labels: str | Path = "folders", names: Sequence[str] = ()) -> Listing:
    """The entries of `src`, by what it is; what is at a URL is fetched.

    Raises `DataError` when it is nothing that can be packed.
    """
    if not isinstance(src, (str, os.PathLike)):
        return from_objects(src, names)
    path = remote.local(src if isinstance(src, str) else Path(src))
    if path.name in ("", ".."):
        path = path.resolve()  # "." in a message reads like the end of a sentence
    by: str | Table = str(labels)
    if str(labels).lower().endswith(_TABLES):
        by = read_table(remote.local(labels))
    try:
        if not path.exists():
            raise DataError(f"{path} does not exist: expected {_EXPECTED}.")
        if path.is_dir():
            classes = cifar_classes(path)
            if classes is not None:
                return from_cifar(path, classes)
            for folder in (path, path / "mnist", path / "MNIST" / "raw"):
                if folder.is_dir() and (files := idx_files(folder)):
                    return from_idx(files)
            return arrange(path, walk(path), by)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
    if path.name.lower().endswith(_TABLES):
        if labels != "folders":
            raise DataError(
                f"{path} is a table and has the labels: leave --labels out, or give the images' folder."
            )
        return rows_of(read_table(path))
    if path.name.lower().endswith(_TARS):
        classes = cifar_classes(path)
        return (
            from_cifar(path, classes)
            if classes is not None
            else arrange(path, list_tar(path), by, archive=True)
        )
    raise DataError(f"{path} is a file of another kind: expected {_EXPECTED}.")


_EXPECTED = "a folder of images, a .csv with file names and labels, or a .tar, .tar.gz or .tar.xz of a folder"
