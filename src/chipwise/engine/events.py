"""Curves for TensorBoard: an event file in the run folder.

So `tensorboard --logdir runs` names each run by its folder. The caller's thread writes, since the thread of
tensorboardX's `SummaryWriter` prints a traceback when the disk is full.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

PREFIX = "events"
_SECONDS = 10.0  # between flushes, each of which waits for the disk


class Events:
    """An event file of the run in `folder`.

    *Arguments:* `purge`, the step from which values of earlier processes are ignored.
    All methods raise `OSError` when the file cannot be written.
    """

    def __init__(self, folder: Path, purge: int | None = None):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        # The file's name has the time in seconds, and two processes of a run may start within a second.
        self._writer = EventsWriter(str(folder / PREFIX), f".{os.getpid()}")
        self._flushed = time.monotonic()
        if purge is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(step=purge, wall_time=time.time(), session_log=start))

    def add(self, step: int, values: dict[str, float]) -> None:
        """A point of each curve at `step`."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=points)))
        if time.monotonic() - self._flushed > _SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        try:
            self._writer.flush()
        finally:  # tensorboardX's `close` leaves the file open if it cannot flush
            self._writer._py_recordio_writer.close()
