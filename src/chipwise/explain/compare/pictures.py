"""Where everything stands in a comparison's pictures: plain numbers for a template to draw.

Bars and strips are in percent of a figure's width, so that they fit any; curves are in pixels of a size that
is given. Axes are logarithmic where the values span more than `FACTOR`, or `BARS`, and their pictures say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..page.axes import Tick, log_steps, spread_out, steps

FACTOR = 40.0  # of curves
BARS = 100.0  # of bars, which have no foot on a logarithmic axis: beyond, they are points
COLOURS = 6  # then they begin again, with other dashes


@dataclass(frozen=True)
class Measure:
    """A value with its interval, to be drawn as a bar or a point. `low`, `high`: `None` when unknown."""

    label: str
    kind: str  # "measured", "predicted" or "published"
    value: float
    low: float | None = None
    high: float | None = None
    points: tuple[float, ...] = ()  # of each repeat


@dataclass(frozen=True)
class Mark:
    """A measure in percent of the width; `low` and `high` `None` where there is no interval to draw."""

    of: Measure
    start: float
    at: float
    low: float | None
    high: float | None
    points: tuple[float, ...]


@dataclass(frozen=True)
class Marks:
    rows: tuple[Mark, ...]
    ticks: tuple[Tick, ...]  # in percent
    log: bool


@dataclass(frozen=True)
class Curve:
    label: str
    kind: str
    colour: int
    points: tuple[tuple[float, float], ...]
    dots: bool = False
    aside: bool = False  # drawn at the edge where it is beyond the others, and the axes do not mind it


@dataclass(frozen=True)
class Drawn:
    """A curve as an SVG path, or as dots alone."""

    of: Curve
    path: str
    dots: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Lines:
    """A picture of curves, in pixels."""

    width: int
    height: int
    left: float
    top: float
    right: float
    bottom: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_log: bool
    y_log: bool
    curves: tuple[Drawn, ...]


class Axis:
    """From values to pixels, or percent, between `start` and `end`; logarithmic when `log`."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False):
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log
        self.a, self.b = (math.log10(low), math.log10(high)) if log else (low, high)

    def __call__(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else self.a
        share = (value - self.a) / (self.b - self.a) if self.b > self.a else 0.5
        return self.start + (self.end - self.start) * min(max(share, 0.0), 1.0)

    def ticks(self, most: int, form: Callable[[float], str]) -> tuple[Tick, ...]:
        """At most about `most` round values, equal labels once."""
        found = log_steps(self.low, self.high, most) if self.log else steps(self.low, self.high, most)
        ticks = [Tick(self(v), form(v)) for v in found]
        return tuple(t for k, t in enumerate(ticks) if k == 0 or t.label != ticks[k - 1].label)


def bars(measures: Sequence[Measure], form: Callable[[float], str], *, linear: bool = False) -> Marks | None:
    """Bars from zero, or points on a logarithmic axis (`log`) where the values span more than `BARS`, unless
    `linear`; `None` for nothing to draw."""
    if not measures:
        return None
    ends = [v for m in measures for v in (m.value, m.low, m.high) if v is not None and v > 0]
    # an interval far beyond every bar is cut, lest it squeeze them all
    most = min(max(ends, default=1.0), 2 * max(m.value for m in measures))
    if not linear and spread_out([m.value for m in measures], BARS):
        # an end far below everything else would squeeze what matters
        least = min(m.value for m in measures)
        low = 10.0 ** math.floor(math.log10(max(min(ends), least / 10)) - 0.1)
        axis = Axis(low, most * 1.1, 0, 100, log=True)
    else:
        axis = Axis(0, most * 1.03, 0, 100)
    return _marks(measures, axis, form)


def strips(measures: Sequence[Measure], form: Callable[[float], str]) -> Marks | None:
    """Points of each repeat and the interval of their mean, on an axis around them all."""
    ends = [v for m in measures for v in (m.value, m.low, m.high, *m.points) if v is not None]
    if not ends:
        return None
    room = 0.06 * (max(ends) - min(ends)) or abs(ends[0]) * 0.01 or 1.0
    return _marks(measures, Axis(min(ends) - room, max(ends) + room, 0, 100), form)


def _marks(measures: Sequence[Measure], axis: Axis, form: Callable[[float], str]) -> Marks:
    rows = tuple(
        Mark(
            m,
            axis.start,
            axis(m.value),
            None if m.low is None or m.high is None else axis(m.low),
            None if m.low is None or m.high is None else axis(m.high),
            tuple(axis(p) for p in m.points),
        )
        for m in measures
    )
    return Marks(rows, axis.ticks(5, form), axis.log)


def lines(
    curves: Sequence[Curve],
    width: int,
    height: int,
    x_form: Callable[[float], str],
    y_form: Callable[[float], str],
    *,
    zero: bool = False,
    x_log: bool = False,
    y_log: bool = False,
) -> Lines | None:
    """Curves over one pair of axes; `None` where there is no point.

    *Arguments:* `zero`, the upward axis begins at 0 where it is linear; `x_log` and `y_log`, an axis may be
    logarithmic, as the upward one may with `zero`.
    """
    counted = [c for c in curves if c.points and not c.aside] or curves
    xs = [x for c in counted for x, _ in c.points]
    ys = [y for c in counted for _, y in c.points]
    if not xs:
        return None
    left, top, right, bottom = 58.0, 12.0, width - 14.0, height - 44.0
    y_log = (zero or y_log) and spread_out(ys, FACTOR)
    x_log = x_log and spread_out(xs, FACTOR)
    y = Axis(*_ends(ys, y_log, zero), bottom, top, y_log)
    x = Axis(
        *((min(xs), max(xs)) if x_log or min(xs) < max(xs) else _ends(xs, False, False)), left, right, x_log
    )
    drawn = []
    for curve in curves:
        at = [(x(a), y(b)) for a, b in curve.points]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in at) if len(at) > 1 and not curve.dots else ""
        drawn.append(Drawn(curve, path, tuple(at) if curve.dots or len(at) == 1 else ()))
    return Lines(
        width,
        height,
        left,
        top,
        right,
        bottom,
        x.ticks(max(width // 110, 3), x_form),
        y.ticks(6, y_form),
        x_log,
        y_log,
        tuple(drawn),
    )


def _ends(values: Sequence[float], log: bool, zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        return low / 1.3, high * 1.3
    if zero and low >= 0:
        return 0.0, high * 1.06 or 1.0
    room = 0.06 * (high - low) or abs(high) * 0.05 or 1.0
    return low - room, high + room
