"""Processes of chipwise's own, which import nothing of the current folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing.context import SpawnContext, SpawnProcess


class Process(SpawnProcess):
    """A process of chipwise's own that imports nothing of the current folder, where others' data
    may be: a spawned Python looks there first, for modules of the standard library too."""

    def start(self) -> None:
        with safe_path():
            super().start()


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """A context in which a Python that is started has no current folder in its path."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


class Spawned(SpawnContext):
    Process = Process
