"""Closes the training loops that a program still holds when it ends, so that they save their state.

Python collects what a module's names hold after it has cleared the modules, when nothing can be
saved any more. `atexit` is too late as well: threads that write a checkpoint cannot start then.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # registers first, so that its threads end later
import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Yielded = TypeVar("Yielded")
Returned = TypeVar("Returned")
Loop = Generator[Yielded, None, Returned]


def closed_at_exit(
    function: Callable[P, Loop[Yielded, Returned]],
) -> Callable[P, Loop[Yielded, Returned]]:
    """`function`, a generator function. Its generators that the main thread begins are closed when
    this process ends. Another thread may run its own at that time."""

    def begun(loop: Loop[Yielded, Returned]) -> Loop[Yielded, Returned]:
        if threading.current_thread() is threading.main_thread():
            _open_in(os.getpid()).add(loop)
        return (yield from loop)

    @functools.wraps(function)
    def begin(*args: P.args, **kwargs: P.kwargs) -> Loop[Yielded, Returned]:
        return begun(function(*args, **kwargs))

    return begin


@functools.cache
def _open_in(process: int) -> weakref.WeakSet[Loop[Any, Any]]:
    """The loops of a process. A fork has copies of those of its parent, and does not close them."""
    loops: weakref.WeakSet[Loop[Any, Any]] = weakref.WeakSet()
    threading._register_atexit(_close, process, loops)  # type: ignore[attr-defined]
    return loops


def _close(process: int, loops: weakref.WeakSet[Loop[Any, Any]]) -> None:
    if os.getpid() != process:
        return
    for loop in list(loops):
        if inspect.getgeneratorstate(loop) == inspect.GEN_RUNNING:  # in another thread
            continue
        try:
            loop.close()
        except Exception:  # as one that nobody catches, and the others are closed too
            sys.excepthook(*sys.exc_info())
