"""Standard output and error for commands. A closed or full output is an error of one line.
Characters that their encoding lacks are escaped."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from ..base import ChipwiseError

unread: set[int] = set()
"""Descriptors of this command that nobody reads any more."""


class _Descriptor(io.FileIO):
    """A descriptor whose first failed write raises `ChipwiseError`, or `OSError` for standard
    error and for a closed pipe. Later writes are dropped, also at Python's end, whose exit code
    would be 120."""

    def write(self, data: Any) -> int:
        try:
            return (super().write(data) or 0) if data else 0  # click tries with nothing
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            # As `head` leaves it
            if self.fileno() == 2 or isinstance(error, BrokenPipeError):
                unread.update({self.fileno()})
                raise
            text = "Cannot write to standard output: {reason}."
            raise ChipwiseError("output-unwritable", text, reason=error) from error


def opened(descriptor: int) -> io.TextIOWrapper:
    """A stream to `descriptor`, encoded and buffered as the process's own, that escapes what the
    encoding lacks."""
    like: Any = sys.__stderr__ if descriptor == 2 else sys.__stdout__
    raw = _Descriptor(descriptor, "w", closefd=False)
    buffer: Any = raw if like.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        like.encoding,
        "backslashreplace",
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


def print_json(name: str, document: Mapping[str, Any]) -> None:
    """Prints the answer of a command to `--json`: one object, which names its schema.

    *Arguments:* `name`: such as `eval/1`, of the schema in `schemas/eval-1.json`. A document that
    is also a file of its own has its schema already.
    """
    whole = {"schema": f"chipwise.{name}", **document}
    print(
        json.dumps(whole, default=lambda one: one.tolist() if hasattr(one, "tolist") else str(one))
    )


def prepare() -> None:
    """Replaces standard output and error by those that are `opened`, and a closed standard error,
    so that no other file gets its number. Raises `ChipwiseError` if standard output is closed."""
    unread.clear()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (to the end of the process)
    if sys.stdout is None:
        sentence = "Standard output is closed: send it to a file, or to /dev/null."
        raise ChipwiseError("output-closed", sentence)
    if sys.stderr is sys.__stderr__:
        sys.stderr = opened(2)
    if sys.stdout is sys.__stdout__:
        sys.stdout = opened(1)
