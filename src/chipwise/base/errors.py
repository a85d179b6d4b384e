"""Every error chipwise raises on purpose: one tree, one branch per fix.

An error is a code, its sentence and its facts:

    raise RecipeError("better-twice", "{metrics:and}: given to both.", metrics=metrics)

The sentence says what was given, what was expected and what to type next. The command line prints
it on one line, without a traceback, and exits with the branch's `exit_code`. Python callers catch
the branch they can handle, and tell errors apart by `code`.

    ChipwiseError 1
    ├── RecipeError 2
    ├── DataError 3
    ├── DeviceError 4
    ├── RunError 5
    │   └── CheckpointError 5
    ├── DivergedError 6
    ├── DeviceFault 7
    ├── Stopped 75
    ├── HostLost 76
    └── Stuck 77

The first line of a class's docstring describes its exit code in `chipwise --help`.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import one_line

if TYPE_CHECKING:
    from .facts import Fact


_LONGEST = 1500  # characters of a sentence, whatever it was given


class ChipwiseError(Exception):
    """An unexpected error.

    The base of all errors raised on purpose. `code` identifies the error, and `facts` are the
    values that it is about. An `OSError` among them is stored as the system's description of it,
    and a path by a handle (`Lock.folder`) as the path that it is now. Without a `sentence`, the one
    of the code in `messages/` is shown.
    """

    exit_code = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        cls.exit_code = exit_code or cls.exit_code

    def __init__(self, code: str, sentence: str | None = None, /, **facts: Any):
        super().__init__(code)
        self.code, self.sentence = code, sentence
        self.facts = {name: _told(value) for name, value in facts.items()}

    @classmethod
    def of(cls, fact: Fact) -> ChipwiseError:
        """The error for a fact."""
        return cls(fact.code, fact.sentence, **fact.numbers)

    @classmethod
    @contextlib.contextmanager
    def of_system(cls, code: str, sentence: str | None = None, /, **facts: Any) -> Iterator[None]:
        """A context that raises this error in the place of an `OSError`, which is its `reason`."""
        try:
            yield
        except OSError as error:
            raise cls(code, sentence, **facts, reason=error) from error

    @property
    def fact(self) -> Fact:
        from .facts import Fact

        return Fact(self.code, self.facts, self.sentence)

    def __str__(self) -> str:
        return self.code if " " in self.code else one_line(str(self.fact), _LONGEST)

    def __reduce__(self) -> Any:  # an error of a worker process reaches its parent whole
        return _again, (type(self), self.code, self.sentence, self.facts)


def _told(value: Any) -> Any:
    if isinstance(value, OSError):
        return value.strerror or str(value)
    if isinstance(value, str | Path) and str(value).startswith("/proc/self/fd/"):
        # The folder of the handle, and what is below as it is named: that may be a link
        parts = Path(value).parts
        return type(value)(Path(os.path.realpath(Path(*parts[:5])), *parts[5:]))
    return value


def _again(
    kind: type[ChipwiseError], code: str, sentence: str | None, facts: dict[str, Any]
) -> ChipwiseError:
    return kind(code, sentence, **facts)


class RecipeError(ChipwiseError, exit_code=2):
    """A recipe, field, setting or duration that cannot be used."""


class DataError(ChipwiseError, exit_code=3):
    """Data that is missing, damaged, empty, or not what the recipe expects."""


def unreadable(path: Any, error: Exception) -> DataError:
    """The error for a file or folder that the system cannot read."""
    return DataError("unreadable", path=path, reason=error)


def library(name: str, code: str, **facts: Any) -> Any:
    """The optional module `name`. Raises `RecipeError` if it cannot be imported, with the `library`
    and the `reason` among its facts."""
    try:
        return import_module(name)
    except ImportError as error:
        why = {"library": name.partition(".")[0], "reason": " ".join(str(error).split())}
        raise RecipeError(code, **why | facts) from error


class DeviceError(ChipwiseError, exit_code=4):
    """The devices asked for are not there, or do not fit the recipe's replicas."""


class RunError(ChipwiseError, exit_code=5):
    """A run folder that cannot be used: unwritable, full, in use, or of another recipe."""


class CheckpointError(RunError):
    """No checkpoint of the run can be read."""


class DivergedError(ChipwiseError, exit_code=6):
    """The loss became NaN or infinite."""


class DeviceFault(ChipwiseError, exit_code=7):
    """A device computed wrong bits: start again without it, from the last good checkpoint."""


class Stopped(ChipwiseError, exit_code=75):
    """The run was asked to stop (SIGTERM, SIGHUP, Ctrl-C) and saved itself: resume with --run."""


class HostLost(ChipwiseError, exit_code=76):
    """Another host of the run is gone: start the run again and it resumes where it saved."""


class Stuck(ChipwiseError, exit_code=77):
    """A host or a device hangs: start the run again and it resumes where it saved."""


def near(word: str, choices: Iterable[Any]) -> str | None:
    """The closest of `choices`, if any is close: a fact to show with `{near:near}`."""
    return next(
        iter(difflib.get_close_matches(word, [str(c) for c in choices], n=1, cutoff=0.5)), None
    )


def invalid(code: str, what: str, value: Any, expected: str, **facts: Any) -> RecipeError:
    """The error for a setting or an argument of the wrong kind or out of range. `what` names it,
    `value` is the value given, and `expected` says what is expected, with what to type."""
    plain = (
        value if isinstance(value, bool | int | float | str | tuple | list | None) else repr(value)
    )
    about = {"what": what, "value": plain, "shown": one_line(repr(value)), "expected": expected}
    about |= {what: plain} if what.isidentifier() else {}  # a setting's own name is a fact too
    return RecipeError(code, "{what} is {shown}: expected {expected}.", **about, **facts)


def unknown(code: str, what: str, value: Any, known: Iterable[Any], **facts: Any) -> RecipeError:
    """The error for a name that is none of the `known` ones."""
    about = {"what": what, "name": str(value), "known": list(known)}
    sentence = "'{name}' is no known {what}.{near:near} Expected {known:or}."
    return RecipeError(
        code, sentence, **about, **{"near": near(str(value), about["known"])} | facts
    )
