"""Finds copies on both sides of a pack: examples of `eval` with the bytes of one of `train`.

The table of records has a CRC-32 of each, over its columns, the image first. CRC-32 is linear, so
the checksum xor that of what follows the image is one for equal images, whatever their labels. It
shows where copies may be, and only those are read.
"""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import numpy as np

from ..packed import PackedFolder


def copies(folder: Path) -> list[tuple[str, str]]:
    """The examples of `eval` in a pack with the stored bytes of one of `train`, and that one, by
    their names. Bytes are those of the image, or of all columns if there is none."""
    train, held = (PackedFolder(folder, split) for split in ("train", "eval"))
    keys, there = _keys(held), _keys(train)
    order = np.argsort(there, kind="stable")
    first, last = (np.searchsorted(there[order], keys, side) for side in ("left", "right"))
    found = []
    for row in np.flatnonzero(first < last).tolist():
        data = held.stored(row)
        rows = order[first[row] : last[row]].tolist()
        if (same := next((i for i in rows if train.stored(i) == data), None)) is not None:
            found.append((held.record_name(row), train.record_name(same)))
    return found


def _keys(source: PackedFolder) -> np.ndarray:
    """`(n,)` uint32: equal for examples with equal bytes."""
    keys = []
    for shard in source.opened():
        sums = shard.record["crc32"]
        if next(iter(source.manifest["columns"])) == "image":
            rest = [column for name, column in shard.columns.items() if name != "image"]
            tails = (b"".join(column[i].tobytes() for column in rest) for i in range(len(sums)))
            sums = sums ^ np.fromiter(map(crc32, tails), np.uint32, len(sums))
        keys.append(sums)
    return np.concatenate(keys)
