"""Reads batches and transfers them to the devices in the background, a few ahead of their use.

While one batch is transferred, the next is read. Memory is bounded: a stream owns a few buffers and
waits for a free one before it reads on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from ..recipe.source import Source
from .buffers import Pool
from .sources import Columns, example_bytes, has
from .stages import stage
from .workers import Batch, Workers

LIMIT_BYTES = 1 << 30  # bytes of batches in memory, on host and devices, unless `FEWEST` need more
FEWEST = 5
MOST = 16
_FILLING = 2  # batches read at a time: workers start the next while one is transferred
_LOOK_SECONDS = 0.002  # seconds between checks for a stop
_ANNOUNCED_BYTES = 1 << 14  # bytes of an example; for smaller ones the kernel's readahead is better
_AHEAD = 3  # batches on the devices, ready for use


def batches_in_memory(batch_bytes: int, limit_bytes: int = LIMIT_BYTES) -> int:
    """The number of batches of `batch_bytes` that a stream holds at once, on host and devices
    together."""
    return max(FEWEST, min(MOST, limit_bytes // max(1, batch_bytes)))


class Stream:
    """The batches of `source` with the examples of `order`, in order, placed on devices by `place`.

    *Arguments:*

    - `order`: arrays of indices `(n,)`, `n` at most `examples`.
    - `place`: a function of columns `(n, ...)` and their indices. `next` returns its result, such
      as arrays on devices.
    - `workers`: see `workers.Workers`, or such an object, which the caller then closes.
    - `limit_bytes`: the bytes of all batches in memory at once. At least five batches are in
      memory.

    *Attributes:*

    - `waited`: seconds in which the device was idle because its batch was missing.
    - `stages`: the seconds of reading, summed over workers.
    - `delivered`: the number of examples so far.
    - `batches`: the most batches in memory at once.
    - `in_use`: how many of these the caller may use at once.

    `next` raises the errors of reading and placing, every time.
    """

    def __init__(
        self,
        source: Source,
        order: Iterable[np.ndarray],
        examples: int,
        place: Callable[[Columns, np.ndarray], Any],
        workers: Workers | int | str | None = None,
        limit_bytes: int = LIMIT_BYTES,
    ):
        self._owned = not isinstance(workers, Workers)
        self.workers = workers if isinstance(workers, Workers) else Workers(source, workers)
        self.stages = self.workers.stages
        self.waited = 0.0
        self.delivered = 0
        self.batch_bytes = examples * example_bytes(self.workers.spec)
        self.batches = batches_in_memory(self.batch_bytes, limit_bytes)
        ahead = min(_AHEAD, (self.batches - _FILLING) // 2)
        self.in_use = self.batches - _FILLING - ahead
        self._place = place
        self._examples = examples
        self._queue: queue.Queue = queue.Queue(maxsize=ahead)
        self._closed = threading.Event()
        self._over: BaseException | None = None  # the error, if there is no next batch
        self._thread = threading.Thread(
            target=self._run, args=(iter(order),), name="chipwise-feed", daemon=True
        )
        self._thread.start()

    def next(
        self, idle: Callable[[], bool] = lambda: True, stopped: Callable[[], bool] = lambda: False
    ) -> Any:
        """Waits for the next batch and returns it. Returns `None` once `stopped()`, even while
        reading hangs.

        `idle()`: whether the device has no other work. Raises `EOFError` after the last batch.
        """
        while not stopped():
            if self._over is not None:
                raise self._over
            was_idle = idle()
            before = time.perf_counter()
            try:
                kind, item = self._queue.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                kind = item = None
            if was_idle:
                self.waited += time.perf_counter() - before
            if kind == "batch":
                return item
            if kind == "over":
                self._over = item
        return None

    def close(self) -> None:
        """Ends reading, and drops unfinished batches."""
        self._over = self._over or RuntimeError("the stream of batches is closed")
        self._closed.set()
        if self._owned:
            self.workers.close()
        self._thread.join()

    def _run(self, order: Iterator[np.ndarray]) -> None:
        pool = Pool(self.batches, lambda: self.workers.buffer(self._examples))
        filling: deque[Batch] = deque()
        try:
            for indices in self._announced(order):
                buffer = pool.get(self._closed)
                if buffer is None:
                    return
                filling.append(self.workers.submit(indices, buffer))
                if len(filling) == _FILLING and not self._deliver(filling.popleft()):
                    return
            while filling:
                if not self._deliver(filling.popleft()):
                    return
            self._put("over", EOFError("there is no batch after the last"))
        except BaseException as error:  # handed to the caller of `next`, who raises it
            self._put("over", error)
        finally:
            pool.close()

    def _announced(self, order: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields `order`, and calls the source's `prefetch` two batches ahead, if it has one."""
        small = example_bytes(self.workers.spec) < _ANNOUNCED_BYTES
        if small or not has(self.workers.source, "prefetch"):
            yield from order
            return
        announced: deque[np.ndarray] = deque()
        for indices in order:
            self.workers.source.prefetch(indices)
            announced.append(indices)
            if len(announced) > _FILLING:
                yield announced.popleft()
        yield from announced

    def _deliver(self, batch: Batch) -> bool:
        while not batch.ready(_LOOK_SECONDS):
            if self._closed.is_set():
                return False
        columns = batch.result()
        if self._closed.is_set():  # the batch may be incomplete
            return False
        with self.stages.watch(), stage("transfer"):
            # Waiting here does not delay the step, measures the transfer, and frees the buffer
            placed = jax.block_until_ready(self._place(columns, batch.indices))
        self.delivered += len(batch.indices)
        return self._put("batch", placed)

    def _put(self, kind: str, item: Any) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put((kind, item), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
