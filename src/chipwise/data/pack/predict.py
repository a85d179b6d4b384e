"""What a pack will weigh and how long it will take, before a byte of it is written."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import DataError
from ..manifest import record_dtype
from .examples import Form, records
from .folders import Listing, Split

SAMPLE = 64  # examples that are read, decoded and encoded to predict the rest, at most
SAMPLE_SECONDS, _SAMPLE_LEAST = 2.0, 4  # when to stop before that: large photographs take 0.3 s each
_RECORD_SECONDS = 4e-5  # handing one over, checksum, sums and writing: one thread's work


@dataclass(frozen=True)
class Share:
    """One split: `examples`; `bytes` of its files; `record_bytes`, of one record's columns, on average."""

    examples: int
    bytes: int
    record_bytes: float


@dataclass(frozen=True)
class Prediction:
    """*Fields:* `splits`; `seconds`, with the workers given; `exact`: sizes are computed, not estimated;
    `shape` of all stored images, or `None`; `enlarged`: share of the sampled images smaller than their
    size."""

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
    seconds: float | None = None,
) -> Prediction:
    """Predicts from up to `SAMPLE` examples of each split, spread evenly, each actually made.

    *Arguments:* `name_bytes`: of the longest name, by split; `check`: called with each name and shape, in the
    order of the listing, to refuse it; `seconds`: when to stop before `SAMPLE` examples, for all splits.

    Raises `DataError` when none of a split can be packed.
    """
    splits, total = {}, 0.0
    enlarged: list[bool] = []
    shapes: set[tuple[int, ...] | None] = set()
    for name, split in listing.splits.items():
        began = time.perf_counter()
        rows: list[int] = []
        pieces = _spread(split, rows, None if seconds is None else seconds / len(listing.splits))
        sizes: list[int] = []
        seen, failed = {}, {}  # row to record's name and shape, or reason: pixels might not fit in memory
        for number, [record] in enumerate(records(split, pieces, form, workers)):
            if record.error is not None:
                failed[rows[number]] = {"name": record.name, "reason": str(record.error)}
                continue
            seen[rows[number]] = record.name, record.shape
            sizes.append(record.nbytes)
            enlarged.append(record.enlarged)
        total += len(split) * ((time.perf_counter() - began) / len(rows) + _RECORD_SECONDS)
        if not seen:
            raise DataError("pack-none-sampled", sampled=len(rows), split=name, **failed[min(failed)])
        for row in sorted(seen):
            check(*seen[row])
        shapes |= {shape if form.store == "raw" else None for _, shape in seen.values()}
        nbytes = float(np.mean(sizes))
        line = record_dtype(form.store, name_bytes[name]).itemsize
        splits[name] = Share(len(split), round(len(split) * (nbytes + line)), nbytes)
    shape = shapes.pop() if len(shapes) == 1 else None
    return Prediction(splits, total, form.store == "raw", shape, float(np.mean(enlarged)))


def _spread(split: Split, sampled: list[int], seconds: float | None) -> Iterator[list[int]]:
    """Rows spread evenly over `split`, one by one, until it is late; `sampled` gets them too."""
    rows = np.unique(np.linspace(0, len(split) - 1, min(SAMPLE, len(split))).astype(np.int64))
    began = time.perf_counter()
    # Mixed, or those that there is time for would all be of the first classes
    for row in np.random.default_rng(0).permutation(rows).tolist():
        late = seconds is not None and time.perf_counter() - began > seconds
        if late and len(sampled) >= _SAMPLE_LEAST:
            return
        sampled.append(row)
        yield [row]


def check_disk(folder: Path, needed: int) -> int:
    """Bytes free where `folder` will be; raises `DataError` when they are fewer than `needed`."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        if place == folder:  # a pack that was begun is not gone on with elsewhere or with other settings
            raise DataError("disk-small-begun", folder=folder, needed=needed, free=free)
        raise DataError("disk-small", folder=folder, needed=needed, place=place, free=free)
    return free
