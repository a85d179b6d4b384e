"""What a pack will weigh and how long it will take, before a byte of it is written."""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import DataError
from ...words.figures import byte_size
from ..manifest import record_dtype
from .entries import Listing, Split
from .images import Form

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


def predict(examples: int, shape: Sequence[int], *, labels: int = 4, name_bytes: int = 16) -> int:
    """Bytes of a raw pack: `examples` images of `shape`, uint8, with `labels` bytes of label each.

    18,632 images at 224×224 are 2.80 GB; as float32 they would be 11.2 GB.
    """
    return examples * (math.prod(shape) + labels + record_dtype("raw", name_bytes).itemsize)


class Sampled(NamedTuple):
    """An example that was made: `bytes` of its columns, whether its image was `enlarged`, and its `shape`."""

    bytes: int
    enlarged: bool
    shape: tuple[int, ...] | None


def sampled(
    listing: Listing,
    form: Form,
    make: Callable[[Split, int, Any], Sampled],
    check: Callable[[str, tuple[int, ...] | None], None],
    name_bytes: Mapping[str, int],
    workers: int,
    seconds: float | None = None,
) -> Prediction:
    """Predicts from up to `SAMPLE` examples of each split, spread evenly, each actually made by `make`.

    *Arguments:* `make`: `(split, i, example or None)`, called by `workers` threads; `check`: called in order
    with names and shapes, to refuse them; `seconds`: when to stop before `SAMPLE` examples, for all splits.

    Raises `DataError` when none of a split can be made.
    """
    splits, total, enlarged, shapes = {}, 0.0, [], set()
    for name, split in listing.splits.items():
        began = time.perf_counter()
        found = _sample(split, make, workers, None if seconds is None else seconds / len(listing.splits))
        each = (time.perf_counter() - began) / len(found)
        total += len(split) * (each + _RECORD_SECONDS)
        made = {row: one for row, one in found.items() if isinstance(one, Sampled)}
        failed = [f"{split.names[row]}: {one}" for row, one in found.items() if not isinstance(one, Sampled)]
        if not made:
            raise DataError(f"None of {len(found)} sampled entries of {name} can be packed: {failed[0]}.")
        for row, one in made.items():
            check(split.names[row], one.shape)
            enlarged.append(one.enlarged)
            shapes.add(one.shape if form.store == "raw" else None)
        record = float(np.mean([one.bytes for one in made.values()]))
        table = record_dtype(form.store, name_bytes[name]).itemsize
        splits[name] = Share(len(split), round(len(split) * (record + table)), record)
    shape = shapes.pop() if len(shapes) == 1 else None
    return Prediction(splits, total, form.store == "raw", shape, float(np.mean(enlarged)))


def _sample(
    split: Split, make: Callable, workers: int, seconds: float | None
) -> dict[int, Sampled | Exception]:
    """Row to what was made of it, or why nothing was, in the order of the rows."""
    rows = np.unique(np.linspace(0, len(split) - 1, min(SAMPLE, len(split))).astype(np.int64))
    # Mixed, or those that there is time for would all be of the first classes
    order = np.random.default_rng(0).permutation(rows).tolist()
    found: dict[int, Sampled | Exception] = {}
    waiting: deque[tuple[int, Future[Sampled]]] = deque()
    began = time.perf_counter()

    def take() -> None:
        row, future = waiting.popleft()
        try:
            found[row] = future.result()
        except (DataError, OSError) as error:
            found[row] = error

    with ThreadPoolExecutor(workers, "chipwise-sample") as pool:
        try:
            for number, row in enumerate(order):
                late = seconds is not None and time.perf_counter() - began > seconds
                if late and number >= _SAMPLE_LEAST:
                    break
                try:
                    # A stranger's [i] may not be safe in threads: then this one reads
                    example = None if split.threads else split.read(row)
                except (DataError, OSError) as error:
                    found[row] = error
                    continue
                waiting.append((row, pool.submit(make, split, row, example)))
                if len(waiting) > workers:
                    take()
            while waiting:
                take()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return dict(sorted(found.items()))


def check_disk(folder: Path, needed: int) -> int:
    """Bytes free where `folder` will be; raises `DataError` when they are fewer than `needed`."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        # A pack that was begun is not gone on with elsewhere or with other settings
        others = "" if place == folder else ", pack to another disk, or give a smaller --size or --store jpeg"
        raise DataError(
            f"{folder} needs {byte_size(needed)}{' more' if place == folder else ''} and {place} has "
            f"{byte_size(free)} free: make room{others}{' and run the same command' if not others else ''}."
        )
    return free
