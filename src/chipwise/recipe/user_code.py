"""Reports errors of functions that users write, with the user's own line."""

from __future__ import annotations

import contextlib
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from ..base import ChipwiseError, RecipeError, near
from ..base.figures import one_line

_WHOLE = 1000  # characters: JAX's sentences say in their middle what to do
_LIBRARIES = {
    "chipwise",
    "equinox",
    "flax",
    "jax",
    "jaxlib",
    "keras",
    "numpy",
    "optax",
    "torch",
    "torchax",
}
BY_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""What JAX raises for a traced program that asks for a value."""


@contextlib.contextmanager
def user_code(what: str, columns: Iterable[str] = ()) -> Iterator[None]:
    """A context for a call of the user's function `what`, such as "Task.loss", which reads a batch
    with these `columns`. Raises its error as a `RecipeError` with the line, from the original
    error."""
    try:
        yield
    except (ChipwiseError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise _told(error, what, sorted(columns)) from error


@contextlib.contextmanager
def any_batch(to: str, fixed: int | None = None) -> Iterator[Any]:
    """A context that traces a model for an export `to` a format, and gives the number of examples
    that it is traced with: `fixed`, or any."""
    try:
        yield jax.export.symbolic_shape("batch")[0] if fixed is None else fixed
    except Exception as error:
        # The model has predicted a batch of a known size before, so its own error is about this one
        inner = error.__cause__ if isinstance(error, RecipeError) else None
        symbolic = ("_DimExpr", "InconclusiveDimension")
        about_size = inner or any(word in f"{type(error)} {error}" for word in symbolic)
        if fixed is not None or not about_size:
            raise
        raise RecipeError("export-any-batch", format=to, where=where_of(inner or error)) from error


def _told(error: Exception, what: str, columns: list[str]) -> RecipeError:
    where = where_of(error)
    if isinstance(error, BY_VALUE):
        return RecipeError("task-decides-by-value", what=what, where=where)
    if (
        isinstance(error, KeyError)
        and columns
        and error.args
        and (key := str(error.args[0])) not in columns
    ):
        return RecipeError(
            "task-column",
            what=what,
            column=key,
            where=where,
            columns=columns,
            near=near(key, columns),
        )
    return RecipeError(
        "task-fails", what=what, where=where, error=type(error).__name__, reason=reason_of(error)
    )


def reason_of(error: Exception) -> str:
    """The error's text on one line, without the colours of Keras."""
    return one_line(re.sub(r"\x1b\[[0-9;]*m", "", str(error)), _WHOLE)


def where_of(error: BaseException) -> str:
    """The line that raised `error`, as messages have it: " at file.py:12", or ""."""
    at = line_of(error)
    return f" at {at[0]}" if at else ""


def line_of(
    error: BaseException, *, installed: bool = True
) -> tuple[str, traceback.FrameSummary] | None:
    """The line that raised `error`, as "file.py:12" and as a frame: the innermost one in a file
    that is not installed, else, with `installed`, the innermost one outside of JAX, PyTorch and the
    other frameworks. `None` if there is none."""
    frames = list(reversed(traceback.extract_tb(error.__traceback__)))
    for own in (True, False) if installed else (True,):
        for frame in frames:
            if Path(frame.filename).is_absolute() and not _installed(Path(frame.filename), own):
                return f"{Path(frame.filename).name}:{frame.lineno}", frame
    return None


def own_line(places: Iterable[tuple[str, int]]) -> str | None:
    """The first of `places`, pairs of a file and a line, outside of installed packages, as
    "file.py:12"."""
    for name, line in places:
        if Path(name).is_absolute() and not _installed(Path(name), True):
            return f"{Path(name).name}:{line}"
    return None


def this_line() -> str:
    """The innermost line that is being run outside of Python and the frameworks, "file.py:12", or
    "<stdin>:12" if no file has it."""
    places = [(f.f_code.co_filename, line) for f, line in traceback.walk_stack(None)]
    own = [place for place in places if not is_framework(place[0])]
    typed = [place for place in places if not Path(place[0]).is_absolute()]
    name, line = (own or typed or places)[0]
    return f"{Path(name).name}:{line}"


def is_framework(name: str) -> bool:
    """Whether the file `name` is part of Python or of a framework, or is none."""
    return not Path(name).is_absolute() or _installed(Path(name), False)


def _installed(file: Path, any_package: bool) -> bool:
    """Whether `file` is part of Python or of a framework. With `any_package`, whether it is part of
    any installed package."""
    for folder in ("site-packages", "dist-packages"):  # also the user's and the system's
        if folder in file.parts:
            package = file.parts[file.parts.index(folder) + 1]
            return any_package or package in _LIBRARIES
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return any(map(file.is_relative_to, [*folders, Path(__file__).parents[1]]))
