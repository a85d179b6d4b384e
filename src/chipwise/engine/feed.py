"""Feeds each step its window and its data, which is kept on the devices if it fits, and streamed otherwise.

In both cases a step gets the same examples in the same order, so results do not depend on the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ..data import order
from ..data.draws import Drawn
from ..data.sources import Spec, check_labels, has, materialize, nbytes
from ..data.stream import Stream
from ..data.weighted import by_epoch
from ..errors import DataError
from ..machine.limits import memory
from ..models.large import SHARD
from ..recipe.source import Source
from ..words.facts import Fact, fact
from .on import ALL, On
from .placement import Placement

_WINDOW_INDICES = 1 << 20  # 4 MB of int32: little memory, and thousands of steps with a small batch
_WINDOW_STEPS = 1024


class Windows:
    """The steps' indices, epochs and hyperparameters, some hundred steps at a time.

    `at(step)` returns the window of `step` on each local group; the next window is made in the background.
    *Arguments:* `length`: steps of a window, for which the program was compiled.
    """

    def __init__(self, recipe, placement: Placement, start: int, length: int):
        self.recipe, self._placement, self.length = recipe, placement, length
        self.clock = recipe.clock
        self._maker = ThreadPoolExecutor(1, "chipwise-window")
        self._first, self._window = start, None
        self._next: Future | None = self._maker.submit(self._make, start)

    def at(self, step: int) -> Any:
        if self._window is None or step >= self._first + self.length:
            self._first = step
            assert self._next is not None
            self._window = self._next.result()
            following = step + self.length
            self._next = self._maker.submit(self._make, following) if following < self.clock.total else None
        return self._window

    def _make(self, start: int) -> Any:
        window = host_window(self.recipe, start, self.length)
        rows = window["rows"]
        replicated = self._placement.put({"hyper": window["hyper"], "rows": {**rows, "indices": None}})
        cut = self._placement.cut(self._placement.own(rows["indices"], axis=1), axis=1)
        return [
            {"hyper": shared["hyper"], "rows": {**shared["rows"], "indices": indices}}
            for shared, indices in zip(replicated, cut, strict=True)
        ]

    def close(self) -> None:
        self._maker.shutdown(wait=True, cancel_futures=True)


def window_length(recipe) -> int:
    """The number of steps in a window of this recipe."""
    return max(1, min(_WINDOW_STEPS, _WINDOW_INDICES // recipe.batch, recipe.clock.total or 1))


def window_spec(recipe, rows: int) -> dict[str, Any]:
    """The shapes of `host_window` on a device that has `rows` rows of each batch."""
    length = window_length(recipe)
    scalar, steps = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((length,), np.int32)
    values = jax.ShapeDtypeStruct((length,), np.float32)
    return {
        "rows": {
            "start": scalar,
            "seed": jax.ShapeDtypeStruct((), np.uint32),
            "indices": jax.ShapeDtypeStruct((length, rows), np.int32),
            "epoch": steps,
            "cut": steps,
        },
        "hyper": {"start": scalar, "tables": dict.fromkeys(recipe.optimizer.hyper, values)},
    }


def host_window(recipe, start: int, length: int) -> dict[str, Any]:
    """The window of steps `start` to `start + length - 1`, as NumPy arrays.

    *Returns* two parts, each with `start` `()` int32:

    - `rows`: the recipe's `seed` `()` uint32; `indices` `(length, batch)` int32; `epoch` `(length,)` int32,
      the
      epoch of a step's first example; `cut` `(length,)` int32, the position in the batch from which examples
      belong to the next epoch.
    - `hyper`: `tables`, name to `(length,)` float32.

    Rows after the end of the run repeat the last one; no step reads them.
    """
    clock, batch = recipe.clock, recipe.batch
    stop = max(start + 1, min(start + length, clock.total))
    rows = stop - start
    indices = order.indices(recipe.seed, start * batch, stop * batch, clock.examples).reshape(rows, batch)
    first = np.arange(start, stop, dtype=np.int64) * batch
    epoch, offset = np.divmod(first, clock.examples)
    tables = recipe.optimizer.tables(clock, start, stop)

    def pad(a):
        return np.concatenate([a, np.repeat(a[-1:], length - rows, axis=0)]) if rows < length else a

    return {
        "rows": {
            "start": np.int32(start),
            "seed": np.uint32(recipe.seed),
            "indices": pad(indices),
            "epoch": pad(epoch.astype(np.int32)),
            "cut": pad(np.minimum(clock.examples - offset, np.iinfo(np.int32).max).astype(np.int32)),
        },
        "hyper": {
            "start": np.int32(start),
            "tables": {name: pad(np.asarray(values, np.float32)) for name, values in tables.items()},
        },
    }


def flat(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns `(n, ...)` as rows `(n, values)`, without copying: the layout of data on a device.

    A TPU gathers rows of a matrix in microseconds. For images `(n, height, width, channels)` its compiler
    first rearranges the whole data set, in every step: 12.6 ms for CIFAR-10 on a v2.
    """
    return {k: v.reshape(len(v), -1) if v.ndim > 1 else v for k, v in columns.items()}


def pick(data: dict, indices, spec: Spec) -> dict:
    """The examples at `indices` `(n,)` of `flat` data, as columns `(n, ...)` with the shapes of `spec`.
    Traced."""
    return {
        k: v.at[indices].get(mode="promise_in_bounds").reshape(len(indices), *spec[k].shape)
        for k, v in data.items()
    }


def fits(source: Source, device_bytes: int | None) -> bool:
    """Whether each device can keep a source: it takes at most a quarter of a device's memory (2 GiB if that
    is unknown), and at most half of the free memory of the host, which reads it first."""
    limit = 2 << 30 if device_bytes is None else device_bytes // 4
    return nbytes(source) <= min(limit, memory().available_bytes // 2)


def resident(source: Source, limit: int | None, feed: str = "auto") -> bool:
    """Whether training data is kept on each device: as `feed` (see `On`) says, by default if it `fits`. Data
    that differs from epoch to epoch is not.

    *Arguments:* `limit`, the bytes of a device's memory, `None` if unknown.
    Raises `DataError` when it must be kept on the device and is larger than its memory, or differs.
    """
    if isinstance(by_epoch(source, 0), Drawn):
        if feed == "device":
            raise DataError("data-by-epoch", source=type(source).__name__)
        return False
    if feed == "device" and limit is not None and nbytes(source) > limit:
        raise DataError("data-above-memory", size=nbytes(source), memory=limit)
    return fits(source, limit) if feed == "auto" else feed == "device"


def read(source: Source, classes: int | None, what: str) -> dict[str, np.ndarray]:
    """All examples of `source`, column to `(examples, ...)`, with checked labels."""
    columns = materialize(source)
    check_labels(columns, classes, what)
    return columns


class Resident:
    """Data that is kept on the devices, so there is nothing to wait for."""

    stream = None
    in_use = math.inf  # batches that may be in use at the same time

    def __init__(self, placed: Any):
        self.placed = placed

    def described(self, source: Source) -> Fact:
        return fact("data-on-device", size=nbytes(source))

    def at(self, step: int, idle: Callable[[], bool], stopped: Callable[[], bool] = lambda: False) -> Any:
        return self.placed

    def close(self) -> None:
        pass


class Streamed:
    """The training batches from step `start` on, read and transferred in the background.

    *Arguments:* `on`, of which `workers` and `exact` matter: whether to refuse examples that are others at a
    second reading.
    """

    def __init__(self, recipe, placement: Placement, start: int, on: On = ALL):
        task, clock = recipe.task, recipe.clock
        source = by_epoch(task.train, recipe.seed)
        differs = isinstance(source, Drawn)
        if differs and on.exact:
            source.check()

        def wanted():
            for step in range(start, clock.total):
                first = step * recipe.batch
                last = first + recipe.batch
                rows = order.indices(recipe.seed, first, last, clock.examples)
                if differs:
                    rows = rows + np.arange(first, last) // clock.examples * clock.examples
                yield placement.own(rows)

        def place(columns, rows):
            check_labels(columns, task.classes, "training", source.indices(rows) if differs else rows)
            if recipe.shards == 1:
                return placement.cut(columns)
            rows = recipe.batch // recipe.replicas
            by_replica = {k: v.reshape(-1, rows, *v.shape[1:]) for k, v in columns.items()}
            return placement.cut(by_replica, within=P(None, SHARD))

        rows = round(recipe.batch * placement.share)
        self.stream = Stream(source, wanted(), rows, place, on.workers)
        self._step = start

    @property
    def in_use(self) -> int:
        return self.stream.in_use

    def described(self, source: Source) -> Fact:
        stream = self.stream
        anew = isinstance(stream.workers.source, Drawn) and not has(stream.workers.source, "fill")
        return fact(
            "data-read-anew" if anew else "data-from-host",
            size=nbytes(source),
            source=type(source).__name__,
            workers=str(stream.workers),
            batches=stream.batches,
            held=stream.batches * stream.batch_bytes,
        )

    def at(self, step: int, idle: Callable[[], bool], stopped: Callable[[], bool] = lambda: False) -> Any:
        """The batch of `step`, which must follow the last one; `None` once `stopped()`."""
        batch = self.stream.next(idle, stopped)
        assert step == self._step, f"the feed is at step {self._step}, the loop at {step}"
        self._step += 1
        return batch

    def close(self) -> None:
        self.stream.close()
