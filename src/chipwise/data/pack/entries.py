"""What there is to pack, before any of it is decoded: names, sizes and labels, and how to read one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...errors import DataError, RecipeError
from ..columns import Columns


@dataclass(frozen=True)
class Split:
    """The entries of one split, in the order in which they are packed.

    *Fields:*

    - `names`: where each came from, such as `cat/0123.jpg`; no two alike.
    - `sizes` `(n,)`: bytes of each as it lies there, 0 where nobody knows.
    - `labels`: columns `(n, ...)` known beforehand; others come with the examples.
    - `read`: `i -> columns of the example`; its `image` may be encoded bytes, an array or a Pillow image.
    - `content`: a digest of what lies there, where names and sizes do not tell enough.
    - `threads`: whether several may call `read` at once.
    """

    names: Sequence[str]
    sizes: np.ndarray
    labels: Columns
    read: Callable[[int], Mapping[str, Any]]
    content: str = ""
    threads: bool = True

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
        """SHA-256 of names, sizes, labels and content: another listing has another one."""
        digest = hashlib.sha256(f"{len(self)} entries {self.content}\n".encode())
        for name, size in zip(self.names, self.sizes.tolist(), strict=True):
            digest.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
        for name, column in sorted(self.labels.items()):
            digest.update(f"{name} {column.dtype.str} {column.shape}\n".encode())
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Listing:
    """Split to its entries; `names`, the classes; `below`, column to the number its values stay below.

    `left_out`: files that are no entries, because their names end like no image's, and other things the
    user should know were not packed. `split_by`: what made the splits: the source as it is, its folders, or
    the table at this path.
    """

    splits: Mapping[str, Split]
    names: tuple[str, ...] = ()
    below: Mapping[str, int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    split_by: Path | Literal["source", "folders"] = "source"


def divided(listing: Listing, share: float) -> Listing:
    """`listing` with `share` of each class of its one split moved to `eval`.

    Of a class with `n` entries `round(n * share)` go, those whose names have the smallest SHA-256: the same
    ones on every machine, and from a folder as from its archive. Entries without one whole number as label
    are one class.
    """
    if not isinstance(share, (int, float)) or not 0 < share < 1:
        raise RecipeError("split-share", share=share)
    if set(listing.splits) != {"train"}:
        given = list(listing.splits)
        if listing.split_by == "source":
            raise DataError("split-twice", share=share, splits=given)
        if listing.split_by == "folders":
            raise DataError("split-twice-folders", share=share, splits=given)
        raise DataError("split-twice-table", share=share, splits=given, table=listing.split_by)
    whole = listing.splits["train"]
    label = whole.labels.get("label")
    if label is None or label.ndim != 1 or label.dtype.kind not in "iu":
        label = np.zeros(len(whole), np.int32)
    keys = [hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() for name in whole.names]
    held_out = np.zeros(len(whole), bool)
    for value in np.unique(label):
        rows = sorted(np.flatnonzero(label == value).tolist(), key=keys.__getitem__)
        held_out[rows[: int(len(rows) * share + 0.5)]] = True
    if held_out.all() or not held_out.any():
        empty = "train" if held_out.all() else "eval"
        raise DataError("split-empty", share=share, examples=len(whole), empty=empty)
    splits = {"train": whole.only(np.flatnonzero(~held_out)), "eval": whole.only(np.flatnonzero(held_out))}
    return replace(listing, splits=splits)
