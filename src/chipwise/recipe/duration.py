"""One grammar for every duration, and the clock that turns it into steps.

    "24ep"      epochs          warm-up, run length, evaluation interval,
    "9360st"    steps           checkpoint interval and schedule boundaries
    "1.2e6ex"   examples        all use these four units and nothing else
    "5%"        of the run's total

An epoch is exactly the `examples` of the training set. The training stream is continuous: step `s`
reads positions `s * batch` to `s * batch + batch - 1`, and the epoch of a position is `position //
examples`. Nothing is dropped and nothing is padded, so 24 epochs of 50,000 examples in batches of
512 are 2,343.75 batches, which is 2,344 steps, not 24 times the 97 full batches of an epoch.

Lengths are kept as fractions until the last moment: 0.1 epoch is a tenth, not the nearest double,
so the step count never depends on a rounding in the middle.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated

from ..base import RecipeError, invalid, near

MOST_STEPS = 2**31 - 1
"""The most steps of a run. Devices count steps in 32 bits."""

UNITS = {"ep": "epochs", "st": "steps", "ex": "examples", "%": "percent of the run"}

# Bounded digit counts: an unbounded exponent such as 1e999999999 would be built digit by digit.
_NUMBER = r"(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:[eE][+-]?[0-9]{1,2})?"
_DURATION = re.compile(rf"({_NUMBER})(ep|st|ex|%)")
_LOOKS_LIKE = re.compile(rf"({_NUMBER})\s*([A-Za-z%]*)")

# The words people type first, each with the unit meant.
_WORDS = {
    **dict.fromkeys(("e", "ep", "eps", "epoch", "epochs"), "ep"),
    **dict.fromkeys(
        ("s", "st", "step", "steps", "it", "iter", "iters", "iterations", "ba", "batches"), "st"
    ),
    **dict.fromkeys(("ex", "sample", "samples", "example", "examples", "images"), "ex"),
    **dict.fromkeys(("%", "pct", "percent", "pc"), "%"),
}


@dataclass(frozen=True, repr=False)
class Duration:
    """A length of training: an exact `value` in a `unit`. Create it with `Duration.parse`.

    `str()` returns the text as it was written. Two durations are equal when value and unit are
    equal (`1ep` and `1.0ep`). Only a `Clock` can say which of two is longer.
    """

    value: Fraction
    unit: str
    text: str = field(compare=False)

    @classmethod
    def parse(cls, text: str | Duration) -> Duration:
        """The duration written as `text`. A `Duration` is returned as it is.

        Raises `RecipeError` for anything outside the grammar, for a negative length, and for a
        fraction of a step or of an example.

        >>> Duration.parse("1.2e6ex").value
        Fraction(1200000, 1)
        """
        if isinstance(text, Duration):
            return text
        if not isinstance(text, str):
            if _is_int(text):
                raise RecipeError("duration-without-unit", duration=repr(text), number=str(text))
            raise RecipeError("duration-unreadable", duration=repr(text), near=None)
        stripped = text.strip()
        match = _DURATION.fullmatch(stripped)
        if match is None:
            raise _unreadable(text, stripped)
        value = Fraction(match[1])
        unit = match[2]
        if unit in ("st", "ex") and value.denominator != 1:
            whole = f"{_half_up(value)}{unit}"
            expected = f"'{whole}', or a fraction of 'ep' or '%'"
            raise invalid(
                "duration-fraction", "duration", stripped, expected, unit=UNITS[unit], whole=whole
            )
        return cls(value, unit, stripped)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Duration.parse({self.text!r})"

    def __bool__(self) -> bool:
        """False for a length of zero."""
        return self.value > 0


@dataclass(frozen=True)
class Marks:
    """The steps in 1..total that end a whole number of `length` steps. Takes no memory for them,
    however many there are. `also` is one more such step, and `but` is one that is left out."""

    length: Fraction
    total: int
    also: int | None = None
    but: int | None = None

    def __contains__(self, step: object) -> bool:
        if step == self.also:
            return True
        if not isinstance(step, int) or step > self.total or step == self.but:
            return False
        return self._next(step - 1) == step

    def __iter__(self) -> Iterator[int]:
        step = self.after(0)
        while step is not None:
            yield step
            step = self.after(step)

    def after(self, step: int) -> int | None:
        """The first mark after `step`."""
        mark = self._next(step)
        if mark == self.but:
            mark = self._next(mark)
        marks = [m for m in (mark, self.also) if m is not None and step < m <= self.total]
        return min(marks, default=None)

    def _next(self, step: int) -> int:
        # In whole numbers, since a loop asks this several times a step. A fraction takes as long as
        # the step of a small net
        steps, parts = self.length.numerator, self.length.denominator
        if steps < parts:  # every step ends some interval
            return step + 1
        intervals = -(-(2 * step + 1) * parts // (2 * steps))
        return (2 * intervals * steps + parts) // (2 * parts)


Length = Annotated[str, Duration, "a duration such as '24ep', '9360st' or '1.2e6ex'"]
"""A duration as it is typed. A `Duration` is taken too."""


@dataclass(frozen=True)
class Clock:
    """The numbers that turn a duration into steps.

    Arguments: `examples`, the size of the training set. `batch`, the examples in a step over all
    devices (global). `total`, the run's steps, or None while they are being computed. All are whole
    numbers. The first two are 1 or more.
    """

    examples: int
    batch: int
    total: int | None = None

    def __post_init__(self) -> None:
        for name in ("examples", "batch", "total"):
            value = getattr(self, name)
            if name == "total" and value is None:
                continue
            least = 0 if name == "total" else 1
            if not _is_int(value) or value < least:
                expected = f"a whole number, {least} or more"
                raise invalid(
                    "clock-field", f"the clock's {name}", value, expected, name=name, least=least
                )
            object.__setattr__(self, name, operator.index(value))

    @classmethod
    def for_run(cls, examples: int, batch: int, duration: str | Duration) -> Clock:
        """The clock of a run that lasts `duration`.

        Raises `RecipeError` for a malformed duration, one in percent (of what?), and more than
        `MOST_STEPS`.

        >>> Clock.for_run(50_000, 512, "24ep").total
        2344
        """
        clock = cls(examples, batch, cls(examples, batch).steps(duration))
        if (clock.total or 0) > MOST_STEPS:
            expected = f"at most {MOST_STEPS:,} steps"
            raise invalid(
                "duration-too-long",
                "duration",
                str(duration),
                expected,
                steps=clock.total,
                most=MOST_STEPS,
            )
        return clock

    def steps(self, duration: str | Duration) -> int:
        """`duration` in whole steps: rounded half up, and at least 1 unless it is zero.

        Raises `RecipeError` for a malformed duration, or for percent when `total` is None.

        >>> Clock(50_000, 512).steps("5ep")
        488
        """
        length = self._exact(Duration.parse(duration))
        return max(_half_up(length), 1) if length else 0

    def marks(self, every: str | Duration) -> Marks:
        """The steps in 1..total that end a whole number of `every`.

        The k-th mark is k times the exact length, rounded once. Adding the rounded length k times
        would drift: 24 rounded epochs of 97.66 steps are 2,352 steps, after the end of a run of
        2,344. The last step is a mark only when it ends an interval.

        Raises `RecipeError` when `every` is zero or `total` is None.

        >>> list(Clock(50_000, 512, 2344).marks("8ep"))
        [781, 1563, 2344]
        """
        length = self._exact(Duration.parse(every))
        if not length:
            raise invalid("interval-zero", "an interval", str(every), "at least '1st'")
        if self.total is None:
            expected = "the run's steps, for marks"
            raise invalid("marks-need-total", "the clock's total", None, expected, every=str(every))
        return Marks(length, self.total)

    def _exact(self, duration: Duration) -> Fraction:
        """Steps as a fraction."""
        if duration.unit == "st":
            return duration.value
        if duration.unit == "ex":
            return duration.value / self.batch
        if duration.unit == "ep":
            return duration.value * self.examples / self.batch
        if self.total is None:
            expected = "'24ep', '9360st' or '1.2e6ex' where the run's length is unknown"
            raise invalid("share-of-unknown-run", "duration", str(duration), expected)
        return duration.value * self.total / 100


def _half_up(x: Fraction) -> int:
    # Not round(): that is half to even, and would give 2 steps for 2.5 but 4 for 3.5.
    return math.floor(x + Fraction(1, 2))


def _is_int(value: object) -> bool:
    """Whether `value` is an integer of Python or NumPy. True and False are not numbers here."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _unreadable(given: str, text: str) -> RecipeError:
    match = _LOOKS_LIKE.fullmatch(text)
    if match is None:
        return RecipeError("duration-unreadable", duration=repr(given), near=None)
    number = match[1]
    word = match[2].lower()
    if not word:
        return RecipeError("duration-without-unit", duration=repr(given), number=number)
    unit = _WORDS.get(word)
    meant = f"{number}{unit}" if unit else near(number + word, [number + unit for unit in UNITS])
    return RecipeError("duration-unreadable", duration=repr(given), near=meant)
