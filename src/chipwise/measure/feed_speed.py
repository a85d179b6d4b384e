"""Measures how many examples a second the host delivers to memory, and how close that is to a plain copy.

Batches are read by the workers of training, in training's order, into reused buffers. No device takes part.
The measurement alternates between one worker, all workers, and plain copies of as many bytes by as many
threads into memory already in use. The source reports the time of reading, decoding and transforming.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..data import order
from ..data.sources import example_bytes, spec_of
from ..data.stages import NAMES
from ..data.workers import Workers, chosen
from ..errors import DataError, RecipeError
from ..machine.limits import memory
from ..machine.record import Record, Series
from ..words.facts import Fact, fact

ROUNDS = 5
NEAR_COPY = 0.5  # share of a plain copy above which the host can gain little
STAGES = NAMES[:3]  # the stages before an example is in memory
_COPY_BYTES = 512 << 20  # source of a plain copy: far larger than caches, small beside a host's memory
_READS = 4  # at least in each turn; if examples are slow, a read is less than a batch
_UNITS = {"examples": "examples/s", "copy": "bytes/s", "seconds": "s"}


def measure_feed(
    source: Any,
    batch: int,
    *,
    name: str = "feed",
    seconds: float = 10.0,
    workers: int | str | None = None,
    rounds: int = ROUNDS,
    described: Mapping[str, Any] | None = None,
) -> Record:
    """Measures how fast this host reads, decodes and transforms the examples of `source`.

    *Arguments:*

    - `batch`: examples of a read, as in training; fewer if a batch takes longer than a turn.
    - `seconds`: of the whole measurement, divided into `rounds`; a few reads to warm up are added.
    - `workers`: as for training: `None`, a number, `"threads:N"` or `"processes:N"`. One worker and all are
      measured.
    - `described`: more about the source, plain JSON values for the record.

    *Returns* a record of the kind "feed" with these figures, where `N` is a number of workers:

    - `examples_per_second.N`;
    - `copy_bytes_per_second.N`: the plain copy, by `N` threads;
    - `seconds_per_example.read`, `.decode` and `.transform`, of one worker.

    Raises `DataError` for an empty source, errors of reading, and `RecipeError` for invalid arguments.
    """
    if batch < 1 or rounds < 1 or not 0 < seconds < float("inf"):
        text = (
            "batch={batch}, seconds={seconds:g}, rounds={rounds}: expected a batch and rounds of at least 1,"
            " seconds above 0."
        )
        raise RecipeError("feed-nothing-to-time", text, batch=batch, seconds=seconds, rounds=rounds)
    if not len(source):
        raise DataError("feed-source-empty", "The source is empty: give one with examples.")
    kind, count = chosen(source, workers)
    counts = sorted({1, count})
    spec = spec_of(source)
    turn = seconds / rounds / (2 * len(counts))
    runs: dict[str, list[float]] = {}
    readers: list[_Reader] = []
    try:
        for n in counts:
            readers.append(_Reader(source, f"{kind}:{n}", batch, turn / _READS))
        copy = Copy(spec, batch, len(source))
        for _ in range(rounds):
            for n, reader in zip(counts, readers, strict=True):
                rate, stages = reader.rate(turn)
                runs.setdefault(f"examples_per_second.{n}", []).append(rate)
                if n == 1:
                    for stage in STAGES:
                        runs.setdefault(f"seconds_per_example.{stage}", []).append(stages[stage])
                runs.setdefault(f"copy_bytes_per_second.{n}", []).append(copy.rate(n, turn))
    finally:
        for reader in readers:
            reader.close()
    measured = {
        "source": type(source).__name__,
        **(described or {}),
        "examples": len(source),
        "bytes_per_example": example_bytes(spec),
        "columns": {n: {"dtype": np.dtype(s.dtype).name, "shape": list(s.shape)} for n, s in spec.items()},
        "batch": batch,
        "examples_a_read": [reader.rows for reader in readers],
        "workers": counts,
        "worker_kind": kind,
        "seconds": seconds,
        "rounds": rounds,
    }
    figures = {figure: Series(_UNITS[figure.partition("_")[0]], tuple(each)) for figure, each in runs.items()}
    return Record.now("feed", name, measured, figures)


class Copy:
    """Plain copies of batches of `rows` examples of `spec`: an upper bound for any reader.

    They read from memory as large as the source, up to 512 MiB and an eighth of the free memory, and write
    into memory already in use.
    """

    def __init__(self, spec: Mapping[str, Any], rows: int, examples: int):
        each = example_bytes(dict(spec))
        size = min(examples * each, _COPY_BYTES, memory().available_bytes // 8)
        batch = max(1, rows * each)
        # Ones, since untouched zeros would all share one page
        self._from = np.ones((max(2, size // batch), batch), np.uint8)

    def rate(self, threads: int, seconds: float) -> float:
        """Bytes a second copied by `threads` threads together, each for `seconds`."""
        source, length = self._from, len(self._from)
        targets = np.ones((threads, 2, source.shape[1]), np.uint8)  # two each in turn, as for batches
        ready = threading.Barrier(threads)

        def copy(thread: int) -> float:
            out, copied, start = targets[thread], 0, thread * length // threads
            ready.wait()
            began = time.perf_counter()
            while (taken := time.perf_counter() - began) < seconds or not copied:
                np.copyto(out[copied % 2], source[(start + copied) % length])
                copied += 1
            return copied * source.shape[1] / taken

        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(copy, range(threads)))


class _Reader:
    """Reads batches of `source` with `workers`, in the order of training, several in flight.

    *Attributes:* `rows`: examples of a read, at most `batch`, such that it takes at most about `seconds`.
    """

    def __init__(self, source: Any, workers: str, batch: int, seconds: float):
        self._workers = Workers(source, workers)
        self._examples, self._position = len(source), 0
        # Two batches in flight keep all workers busy; parts of batches may go to one worker each
        self.rows = self._calibrated(batch, seconds)
        self._buffers = self._made(self.rows, 2 if self.rows == batch else 2 * self._workers.count)

    def rate(self, seconds: float) -> tuple[float, dict[str, float]]:
        """Examples a second over `seconds` or one read, and core-seconds per example by stage."""
        before, done, number = self._workers.stages.seconds, 0, 0
        flying: deque[Any] = deque()
        began = time.perf_counter()
        while True:
            late = number > 0 and time.perf_counter() - began >= seconds
            if not late:
                flying.append(self._submit(self.rows, self._buffers[number % len(self._buffers)]))
                number += 1
            if late and not flying:
                break
            if late or len(flying) == len(self._buffers):
                flying.popleft().result()
                done += self.rows
        taken, after = time.perf_counter() - began, self._workers.stages.seconds
        return done / taken, {stage: (after[stage] - before[stage]) / done for stage in NAMES}

    def close(self) -> None:
        self._workers.close()
        for buffer in getattr(self, "_buffers", ()):
            buffer.close()

    def _submit(self, rows: int, buffer: Any) -> Any:
        start, self._position = self._position, self._position + rows
        return self._workers.submit(order.indices(0, start, start + rows, self._examples), buffer)

    def _made(self, rows: int, count: int) -> list[Any]:
        """Buffers already in use, like those of a running training."""
        buffers = [self._workers.buffer(rows) for _ in range(count)]
        for buffer in buffers:
            for column in buffer.columns().values():
                column[...] = 0
        return buffers

    def _calibrated(self, batch: int, seconds: float) -> int:
        """The examples of a read: one at first, then more while reads are quick."""
        rows = 1
        self._read(rows)  # untimed: a source may open files or load its data now
        while True:
            taken = self._read(rows)
            if rows == batch or taken * 8 > seconds:
                return max(1, min(batch, int(rows * seconds / max(taken, 1e-9))))
            rows = min(batch, rows * 8)

    def _read(self, rows: int) -> float:
        """The seconds of a read."""
        (buffer,) = self._made(rows, 1)
        began = time.perf_counter()
        self._submit(rows, buffer).result()
        taken = time.perf_counter() - began
        buffer.close()
        return taken


def verdict(record: Record) -> list[Fact]:
    """The conclusion from a record of the kind "feed", as facts: the speed and its limit, the slowest stage,
    and what would help. Only the first if the host delivers at least half of a plain copy."""
    measured, figures = record.measured, record.figures
    count, size = max(measured["workers"]), measured["bytes_per_example"]
    rate = figures[f"examples_per_second.{count}"].median
    share = rate * size / figures[f"copy_bytes_per_second.{count}"].median
    findings = [
        fact(
            "feed-speed",
            workers=count,
            kind=measured["worker_kind"],
            examples_per_second=rate,
            bytes_per_second=rate * size,
            share_of_copy=share,
        )
    ]
    each = {stage: figures[f"seconds_per_example.{stage}"].median for stage in STAGES}
    slowest = max(each, key=each.__getitem__)
    part = min(1.0, each[slowest] * figures["examples_per_second.1"].median)
    if share >= NEAR_COPY or part < 0.5:
        return findings
    findings.append(fact(f"feed-slowest-{slowest}", share=part))
    if slowest != "read" or measured["source"] != "PackedFolder":
        findings.append(fact(f"feed-advice-{slowest}", raw_bytes=measured["examples"] * size))
    return findings
