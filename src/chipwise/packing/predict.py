"""What a pack will weigh and how long it will take, before a byte of it is written."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..feed.manifest import record_dtype
from .entries import Listing
from .images import Form, SizesDiffer

SAMPLE = 64  # examples that are read, decoded and encoded to predict the rest
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


def predict(examples: int, shape: Sequence[int], *, labels: int = 4, name_bytes: int = 16) -> int:
    """Bytes of a raw pack: `examples` images of `shape`, uint8, with `labels` bytes of label each.

    18,632 images at 224×224 are 2.80 GB; as float32 they would be 11.2 GB.
    """
    return examples * (math.prod(shape) + labels + record_dtype("raw", name_bytes).itemsize)


def sampled(listing: Listing, form: Form, make, name_bytes: Mapping[str, int], workers: int) -> Prediction:
    """Predicts from up to `SAMPLE` examples of each split, spread evenly, each actually made by `make`.

    `make`: `(split, i) -> columns, enlarged`. Raises `DataError` when none of a split can be made.
    """
    splits, seconds, enlarged, shapes = {}, 0.0, [], set()
    for name, split in listing.splits.items():
        rows = np.unique(np.linspace(0, len(split) - 1, min(SAMPLE, len(split))).astype(np.int64))
        sizes, began = [], time.perf_counter()
        failed: tuple[str, str] | None = None
        for row in rows.tolist():
            try:
                columns, larger = make(split, row)
            except SizesDiffer:
                raise
            except (DataError, OSError) as error:
                failed = failed or (split.names[row], str(error))
                continue
            sizes.append(
                sum(len(v) if isinstance(v, bytes) else np.asarray(v).nbytes for v in columns.values())
            )
            enlarged.append(larger)
            shapes.add(getattr(columns.get("image"), "shape", None))
        if failed is not None and not sizes:
            raise DataError(
                f"None of {len(rows)} sampled entries of {name} can be packed: {failed[0]}: {failed[1]}."
            )
        each = (time.perf_counter() - began) / len(rows)
        seconds += len(split) * (each / workers + _RECORD_SECONDS)
        record = float(np.mean(sizes))
        table = record_dtype(form.store, name_bytes[name]).itemsize
        splits[name] = Share(len(split), round(len(split) * (record + table)), record)
    shape = shapes.pop() if len(shapes) == 1 else None
    return Prediction(splits, seconds, form.store == "raw", shape, float(np.mean(enlarged)))


def check_disk(folder: Path, needed: int) -> int:
    """Bytes free where `folder` will be; raises `DataError` when they are fewer than `needed`."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise DataError(
            f"{folder} needs {needed / 1e9:.2f} GB and {place} has {free / 1e9:.2f} GB free: make room, "
            f"pack to another disk, or give a smaller --size or --store jpeg."
        )
    return free
