"""Measures the host's time for making batches by stage: reading, decoding, transforming,
transferring.

A `Stages` sums the time of the threads that `watch` it. A source marks its stages:

    with stage("decode"):
        pixels = decode(data)

Outside a watched thread this counts nothing. In nested stages, time belongs to the innermost one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

NAMES = ("read", "decode", "transform", "transfer")
_local = threading.local()


class Stages:
    """Seconds by stage, summed over threads, so two threads may add two seconds per second."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(NAMES, 0.0)
        self._lock = threading.Lock()

    def add(self, seconds: Mapping[str, float]) -> None:
        with self._lock:
            for name, value in seconds.items():
                self._seconds[name] += value

    @property
    def seconds(self) -> dict[str, float]:
        with self._lock:
            return dict(self._seconds)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A context that counts the stages of this thread. They are added at its end."""
        seen = dict.fromkeys(NAMES, 0.0)
        before = getattr(_local, "seen", None), getattr(_local, "inside", None)
        _local.seen = seen
        _local.inside = None
        try:
            yield
        finally:
            _local.seen, _local.inside = before
            self.add(seen)


class stage:
    """A context whose time counts as one of `NAMES`."""

    __slots__ = ("_began", "_name", "_outer", "_seen")

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> None:
        self._seen = getattr(_local, "seen", None)
        if self._seen is None:
            return
        self._began = time.perf_counter()
        self._outer = _local.inside
        if self._outer is not None:
            self._seen[self._outer._name] += self._began - self._outer._began
        _local.inside = self

    def __exit__(self, *_: object) -> None:
        if self._seen is None:
            return
        now = time.perf_counter()
        self._seen[self._name] += now - self._began
        _local.inside = self._outer
        if self._outer is not None:
            self._outer._began = now
