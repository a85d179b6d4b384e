"""Feeds each step its window and its data, which is kept on the devices if it fits, and streamed
otherwise.

In both cases a step gets the same examples in the same order and in arrays of the same shapes, so
results do not depend on the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from ..base import DataError, Fact, fact
from ..data import order
from ..data.draws import Drawn
from ..data.sources import Columns, has, nbytes, take
from ..data.stream import Stream
from ..data.weighted import by_epoch
from ..machine.limits import memory
from ..models.large import SHARD
from ..recipe.recipe import Recipe
from ..recipe.source import Source, kind_of
from ..step.window import flat, host_window
from .indexed import Indexed
from .on import ALL, On
from .placement import Placement


class StepWindows:
    """The steps' indices, epochs and hyperparameters, some hundred steps at a time.

    `at(step)` returns the window of `step` on each local group. A thread prepares the next window
    in the background.

    *Arguments:* `length`: the steps of a window, for which the program was compiled.
    """

    def __init__(self, recipe, placement: Placement, start: int, length: int):
        self.recipe, self._placement, self.length = recipe, placement, length
        self.clock = recipe.clock
        self._maker = ThreadPoolExecutor(1, "chipwise-window")
        self._first, self._window = start, None
        self._next: Future | None = self._maker.submit(self._make, start)

    @property
    def end(self) -> int:
        """The step after the last one of the window that `at` returned."""
        return self._first + self.length

    def at(self, step: int) -> Any:
        if self._window is None or step >= self._first + self.length:
            self._first = step
            assert self._next is not None
            self._window = self._next.result()
            following = step + self.length
            self._next = (
                self._maker.submit(self._make, following) if following < self.clock.total else None
            )
        return self._window

    def _make(self, start: int) -> Any:
        window = host_window(self.recipe, start, self.length)
        rows = window["rows"]
        replicated = self._placement.put(
            {"hyper": window["hyper"], "rows": {**rows, "indices": None}}
        )
        cut = self._placement.cut(self._placement.own(rows["indices"], axis=1), axis=1)
        return [
            {"hyper": shared["hyper"], "rows": {**shared["rows"], "indices": indices}}
            for shared, indices in zip(replicated, cut, strict=True)
        ]

    def close(self) -> None:
        self._maker.shutdown(wait=True, cancel_futures=True)


def fits(source: Source, device_bytes: int | None) -> bool:
    """Whether each device can keep a source: it takes at most a quarter of a device's memory (2 GiB
    if that is unknown), and at most half of the free memory of the host, which reads it first."""
    limit = 2 << 30 if device_bytes is None else device_bytes // 4
    return nbytes(source) <= min(limit, memory().available_bytes // 2)


def resident(source: Source, limit: int | None, feed: str = "auto") -> bool:
    """Whether training data is kept on each device. `feed` decides (see `On`). By default, data is
    kept if it `fits`. Data that differs from epoch to epoch is not.

    *Arguments:* `limit`: the bytes of a device's memory, `None` if unknown. Raises `DataError` when
    data must be kept on the device, but is larger than its memory or differs from epoch to epoch.
    """
    if isinstance(by_epoch(source, 0), Drawn):
        if feed == "device":
            raise DataError("data-by-epoch", source=kind_of(source).__name__)
        return False
    if feed == "device" and limit is not None and nbytes(source) > limit:
        raise DataError("data-above-memory", size=nbytes(source), memory=limit)
    return fits(source, limit) if feed == "auto" else feed == "device"


def positions(recipe: Recipe, source: Any, step: int, count: int) -> np.ndarray:
    """The indices in `source`, which is from `by_epoch`, of `count` examples that are trained after
    `step` steps. Those of a `Drawn` are its positions."""
    first, examples = step * recipe.batch, len(source)
    rows = order.indices(recipe.seed, first, first + count, examples)
    if isinstance(source, Drawn):
        rows = rows + np.arange(first, first + count) // examples * examples
    return rows


def trained(recipe: Recipe, step: int, count: int) -> tuple[np.ndarray, Columns]:
    """The numbers and columns of `count` examples that are trained after `step` steps."""
    source = by_epoch(recipe.task.train, recipe.seed)
    rows = positions(recipe, source, step, count)
    return source.indices(rows) if isinstance(source, Drawn) else rows, take(source, rows)


class Resident:
    """Data that is kept on the devices, so there is nothing to wait for."""

    stream = None
    in_use = math.inf  # batches that may be in use at the same time

    def __init__(self, placed: Any):
        self.placed = placed

    def described(self, source: Source) -> Fact:
        return fact("data-on-device", size=nbytes(source))

    def at(
        self, step: int, idle: Callable[[], bool], stopped: Callable[[], bool] = lambda: False
    ) -> Any:
        return self.placed

    def close(self) -> None:
        pass


class Streamed:
    """The training batches from step `start` on, read and transferred in the background.

    *Arguments:* `indexed` checks their values. `on`: only `workers` and `exact` matter. `exact`
    decides whether to refuse examples that differ at a second reading.
    """

    def __init__(self, recipe, placement: Placement, start: int, indexed: Indexed, on: On = ALL):
        source = by_epoch(recipe.task.train, recipe.seed)
        differs = isinstance(source, Drawn)
        if differs and on.exact:
            source.check()

        def wanted():
            for step in range(start, recipe.clock.total):
                yield placement.own(positions(recipe, source, step, recipe.batch))

        def place(columns, rows):
            indexed.check(columns, "training", source.indices(rows) if differs else rows)
            columns = flat(columns)
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
            source=kind_of(source).__name__,
            workers=str(stream.workers),
            batches=stream.batches,
            held=stream.batches * stream.batch_bytes,
        )

    def at(
        self, step: int, idle: Callable[[], bool], stopped: Callable[[], bool] = lambda: False
    ) -> Any:
        """Returns the batch of `step`, which must follow the last one, or `None` once
        `stopped()`."""
        batch = self.stream.next(idle, stopped)
        assert step == self._step, f"the feed is at step {self._step}, the loop at {step}"
        self._step += 1
        return batch

    def close(self) -> None:
        self.stream.close()
