"""A limit of time for calls that cannot be stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


class TooSlow(TimeoutError):
    """A call took too long: another attempt would take as long."""


def in_time(do: Callable[[], T], late: Callable[[float], str | None]) -> T:
    """`do()`, in a thread that is abandoned when it is late, and may then go on for ever.

    *Arguments:* `late`: from the seconds so far to why they are too many, if they are. Raises `TooSlow`.
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
