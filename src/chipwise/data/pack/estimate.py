"""Predicts the size and time of a pack before it is written."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import DataError
from ..manifest import record_dtype
from .examples import Form, records
from .folders import Listing

SAMPLE = 32  # examples of a split that are read, decoded and encoded to predict the rest
_RECORD_SECONDS = 4e-5  # passing one on, checksum, sums and writing: one thread's work


@dataclass(frozen=True)
class Share:
    """The prediction of a split: `examples`; `bytes` of its files; `record_bytes`: mean of a record's
    columns."""

    examples: int
    bytes: int
    record_bytes: float


@dataclass(frozen=True)
class Prediction:
    """*Fields:* `splits`; `seconds`, with the given workers; `exact`: whether sizes are exact; `shape` of all
    stored images, or `None`; `enlarged`: the share of the sampled images that are enlarged."""

    splits: Mapping[str, Share]
    seconds: float
    exact: bool
    shape: tuple[int, ...] | None
    enlarged: float

    @property
    def bytes(self) -> int:
        return sum(share.bytes for share in self.splits.values())


def predict(
    listing: Listing,
    form: Form,
    workers: int,
    name_bytes: Mapping[str, int],
    check: Callable[[str, tuple[int, ...] | None], None],
) -> Prediction:
    """Predicts size and time from up to `SAMPLE` examples of each split, evenly spread, which are converted.

    *Arguments:* `name_bytes`: of the longest name, by split; `check`: called with each name and shape, in the
    order of the listing, and may raise.

    Raises `DataError` if no example of a split's sample can be packed.
    """
    splits, total = {}, 0.0
    enlarged: list[bool] = []
    shapes: set[tuple[int, ...] | None] = set()
    for name, split in listing.splits.items():
        began = time.perf_counter()
        rows = np.unique(np.linspace(0, len(split) - 1, min(SAMPLE, len(split))).astype(np.int64)).tolist()
        sizes: list[int] = []
        failed = []
        for [record] in records(split, ([row] for row in rows), form, workers):
            if record.error is not None:
                failed.append({"name": record.name, "reason": str(record.error)})
                continue
            check(record.name, record.shape)
            shapes.add(record.shape if form.store == "raw" else None)
            sizes.append(record.nbytes)
            enlarged.append(record.enlarged)
        total += len(split) * ((time.perf_counter() - began) / len(rows) + _RECORD_SECONDS)
        if not sizes:
            wrong = "None of {sampled} sampled entries of {split} can be packed. {name:plain}: {reason}"
            raise DataError("pack-none-sampled", wrong, sampled=len(rows), split=name, **failed[0])
        nbytes = float(np.mean(sizes))
        line = record_dtype(form.store, name_bytes[name]).itemsize
        splits[name] = Share(len(split), round(len(split) * (nbytes + line)), nbytes)
    shape = shapes.pop() if len(shapes) == 1 else None
    return Prediction(splits, total, form.store == "raw", shape, float(np.mean(enlarged)))


def check_disk(folder: Path, needed: int) -> int:
    """The free bytes on the disk of `folder`. Raises `DataError` if they are fewer than `needed`."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        if place == folder:  # a partial pack cannot continue elsewhere or with other settings
            wrong = "{folder} needs {needed:bytes} more and has {free:bytes}: make room and run it again."
            raise DataError("disk-small-begun", wrong, folder=folder, needed=needed, free=free)
        wrong = "{folder} needs {needed:bytes}, and {place} has {free:bytes}: give --size, or another disk."
        raise DataError("disk-small", wrong, folder=folder, needed=needed, place=place, free=free)
    return free
