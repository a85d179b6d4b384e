"""A pool of threads that never keeps a process from ending, even when one of them hangs in a read."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Threads:
    """`count` daemon threads. Python's own pool waits for its threads when the interpreter ends."""

    def __init__(self, count: int, name: str):
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_run, args=(self._tasks,), name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        self._end = weakref.finalize(self, _end, self._tasks, count)  # also of a pool that nobody closed
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        future: Future = Future()
        self._tasks.put((future, function, arguments))
        return future

    def close(self, seconds: float) -> None:
        """Ends the threads, waiting so long for what they are doing; what has not begun is cancelled."""
        while True:
            try:
                self._tasks.get_nowait()[0].cancel()
            except queue.Empty:
                break
        self._end()
        for thread in self._threads:
            thread.join(seconds)


def _run(tasks: queue.SimpleQueue) -> None:
    while (task := tasks.get()) is not None:
        future, function, arguments = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # for whoever asks for the result
            future.set_exception(error)
        del task, future, function, arguments  # and with them the batch's memory


def _end(tasks: queue.SimpleQueue, count: int) -> None:
    for _ in range(count):
        tasks.put(None)
