"""Packing batches that a program makes itself, in memory or on the way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import DataError
from .writer import SHARD_BYTES, Writer


def write_packed(
    path: str | Path,
    batches: Iterable[Mapping[str, Any]],
    *,
    classes: int | None = None,
    names: Sequence[str] = (),
    below: Mapping[str, int] | None = None,
    split: str | None = "train",
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes a split of a packed folder and returns its path. It appears whole, or not at all.

    *Arguments:* `batches`: dicts of columns `(n, ...)`, all alike but for `n`, written as they come;
    `classes`: column `label` lies in `[0, classes)`, and `names` are theirs; `below`: the same for
    other columns of whole numbers, such as `{"token": 50257}`; `shard_bytes`: of the examples in a shard.

    Raises `DataError` when the folder exists, for no examples, columns that change, values out of range
    and a full disk; nothing is left behind then. `chipwise pack` goes on where it was stopped instead.
    """
    folder = Path(path).expanduser() / (split or "")
    if folder.exists():
        raise DataError(f"{folder} exists: remove it, or pack to another folder.")
    limits = {**(below or {}), **({"label": classes} if classes is not None else {})}
    partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    try:
        writer = Writer(
            partial,
            store="raw",
            names=names,
            below=limits,
            identity="",
            name_bytes=1,
            shard_bytes=shard_bytes,
        )
        try:
            for batch in batches:
                n = len(next(iter(batch.values()), ()))
                writer.add_batch([""] * n, batch)  # made by a program: the records have no names
            writer.finish({"fingerprint": None, "examples": writer.consumed})
        finally:
            writer.close()
        os.rename(partial, folder)
    except DataError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise DataError(f"Cannot write {folder}: {error.__cause__.strerror}.") from error.__cause__
    except OSError as error:
        raise DataError(f"Cannot write {folder}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
