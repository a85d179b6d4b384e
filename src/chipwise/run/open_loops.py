"""Closes the training loops that a program still holds when it ends, so that they save their state.

Python collects what a module's names hold after it has cleared the modules, when nothing can be
saved any more. `atexit` is too late as well: threads that write a checkpoint cannot start then.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  # registers first, so that its threads end later
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Loop = TypeVar("Loop", bound=Generator[Any, Any, Any])
_open: weakref.WeakSet[Generator[Any, Any, Any]] = weakref.WeakSet()


def closed_at_exit(function: Callable[P, Loop]) -> Callable[P, Loop]:
    """`function`, a generator function, whose generators this process closes when it ends. Not
    those of other threads, which may run at that time."""

    @functools.wraps(function)
    def begin(*args: P.args, **kwargs: P.kwargs) -> Loop:
        loop = function(*args, **kwargs)
        if threading.current_thread() is threading.main_thread():
            _registered()
            _open.add(loop)
        return loop

    return begin


@functools.cache
def _registered() -> None:
    threading._register_atexit(_close, os.getpid())  # type: ignore[attr-defined]


def _close(owner: int) -> None:
    if os.getpid() != owner:  # a fork, which has copies of the loops
        return
    for loop in list(_open):
        try:
            loop.close()
        except Exception:  # as one that nobody catches, and the others are closed too
            sys.excepthook(*sys.exc_info())
