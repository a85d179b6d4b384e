"""A limit of time for calls that cannot be stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


class TooSlow(TimeoutError):
    """A call took too long, and another attempt would take as long."""


def in_time(do: Callable[[], T], late: Callable[[float], str | None]) -> T:
    """The result of `do()`, which runs in a thread. A late thread is abandoned, and may then run
    forever.

    *Arguments:* `late`: a function of the seconds so far that returns why they are too many, or
    `None`. Raises `TooSlow`.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(do())
        except BaseException as error:
            future.set_exception(error)

    began = time.monotonic()
    threading.Thread(target=work, daemon=True).start()
    while not future.done():
        wait([future], 1.0)
        if (why := late(time.monotonic() - began)) is not None and not future.done():
            raise TooSlow(why)
    return future.result()
