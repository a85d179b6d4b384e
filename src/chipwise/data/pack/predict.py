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
from .entries import Listing, Split
from .examples import Form, Record, records

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
    check: Callable[[Record], None],
    seconds: float | None = None,
) -> Prediction:
    """Predicts from up to `SAMPLE` examples of each split, spread evenly, each actually made.

    *Arguments:* `name_bytes`: of the longest name, by split; `check`: called with each record, in the order
    of the listing, to refuse it; `seconds`: when to stop before `SAMPLE` examples, for all splits.

    Raises `DataError` when none of a split can be packed.
    """
    splits, total, enlarged, shapes = {}, 0.0, [], set()
    for name, split in listing.splits.items():
        began = time.perf_counter()
        sampled: list[int] = []
        pieces = _spread(split, sampled, None if seconds is None else seconds / len(listing.splits))
        made = [record for piece in records(split, pieces, form, workers) for record in piece]
        total += len(split) * ((time.perf_counter() - began) / len(made) + _RECORD_SECONDS)
        in_order = [record for _, record in sorted(zip(sampled, made, strict=True), key=lambda pair: pair[0])]
        packed = [record for record in in_order if record.error is None]
        if not packed:
            first = in_order[0]
            raise DataError(
                "pack-none-sampled", sampled=len(made), split=name, name=first.name, reason=str(first.error)
            )
        for record in packed:
            check(record)
            enlarged.append(record.enlarged)
            shapes.add(record.pixels.shape if form.store == "raw" and record.pixels is not None else None)
        nbytes = float(np.mean([record.nbytes for record in packed]))
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
