"""Where the host's time goes while it makes batches: reading, decoding, transforming, transferring.

A `Stages` adds up what the threads that `watch` it spend; a source says what it is doing:

    with stage("decode"):
        pixels = decode(data)

Outside of a watched thread that costs nothing and counts nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = ("read", "decode", "transform", "transfer")
_local = threading.local()


class Stages:
    """Seconds by stage, summed over threads: with two threads they may grow by two a second."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(NAMES, 0.0)
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._seconds[name] += seconds

    @property
    def seconds(self) -> dict[str, float]:
        with self._lock:
            return dict(self._seconds)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Counts the stages that this thread enters inside, here."""
        before = getattr(_local, "stages", None)
        _local.stages = self
        try:
            yield
        finally:
            _local.stages = before


class stage:  # noqa: N801 (used like a function: `with stage("read"):`)
    """Counts the time inside as one of `NAMES`. Stages do not nest: an inner one is part of the outer."""

    __slots__ = ("_began", "_name", "_stages")

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        # The inner one finds no collector, so that no second is counted twice
        self._stages = getattr(_local, "stages", None)
        if self._stages is not None:
            _local.stages = None
            self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._stages is not None:
            self._stages.add(self._name, time.perf_counter() - self._began)
            _local.stages = self._stages
