"""Batches on their way to the devices: read and transferred in the background, a few ahead of their use.

While one batch is transferred the next is being read. Everything in between is bounded: a stream owns a
handful of buffers and waits for one to come back before it reads on.
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

LIMIT_BYTES = 1 << 30  # of batches in memory, on the host and on the devices, if `FEWEST` are not more
FEWEST, MOST = 5, 16
_FILLING = 2  # batches being read at a time: the workers begin the next while one is transferred
_LOOK_SECONDS = 0.002  # between looks at what else may have happened
_ANNOUNCED_BYTES = 1 << 14  # of an example: the kernel's own reading ahead serves smaller ones better
_AHEAD = 3  # batches that lie on the devices, ready to be used


def batches_in_memory(batch_bytes: int, limit_bytes: int = LIMIT_BYTES) -> int:
    """How many batches of `batch_bytes` a stream holds at once, on the host and on the devices together."""
    return max(FEWEST, min(MOST, limit_bytes // max(1, batch_bytes)))


class Stream:
    """The batches of `source` that hold the examples `order`, in order, as `place` puts them on devices.

    *Arguments:*

    - `order`: arrays of indices `(n,)`, `n` at most `examples`.
    - `place`: columns `(n, ...)` and their indices to what `next` gives, such as arrays on devices.
    - `workers`: see `workers.Workers`; or such an object, which the caller then closes.
    - `limit_bytes`: of all batches in memory at once; at least five are.

    *Attributes:* `waited`, seconds for which the device had nothing to do because its batch was not there;
    `stages`, the seconds that reading took, summed over workers; `delivered`, examples so far; `batches`,
    how many may be in memory at once; `in_use`, how many of these the caller may hold on to.

    What reading or placing raises is raised by `next`, again and again.
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
        self.waited, self.delivered = 0.0, 0
        self.batch_bytes = examples * example_bytes(self.workers.spec)
        self.batches = batches_in_memory(self.batch_bytes, limit_bytes)
        ahead = min(_AHEAD, (self.batches - _FILLING) // 2)
        self.in_use = self.batches - _FILLING - ahead
        self._place, self._examples = place, examples
        self._queue: queue.Queue = queue.Queue(maxsize=ahead)
        self._closed = threading.Event()
        self._over: BaseException | None = None  # why there is no next batch
        self._thread = threading.Thread(
            target=self._run, args=(iter(order),), name="chipwise-feed", daemon=True
        )
        self._thread.start()

    def next(
        self, idle: Callable[[], bool] = lambda: True, stopped: Callable[[], bool] = lambda: False
    ) -> Any:
        """The next batch, when it is there; `None` once `stopped()`, however long reading may take.

        `idle()`: whether the device has nothing else to do. Raises `EOFError` after the last batch.
        """
        while not stopped():
            if self._over is not None:
                raise self._over
            was_idle, before = idle(), time.perf_counter()
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
        """Ends reading and gives up what is being read."""
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
        """`order`, each two batches after the source was told to fetch it from the disk, if it can be."""
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
        if self._closed.is_set():  # what is filled then may be half
            return False
        with self.stages.watch(), stage("transfer"):
            # Waiting here costs the step nothing, tells what a transfer takes, and gives the buffer back
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
