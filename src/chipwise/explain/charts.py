"""Computes the layout of charts as plain numbers in pixels, which `templates/charts.html.jinja`
draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..base.figures import dollars, known, short

LOG_FROM = 30.0  # highest over lowest value, above which curves may have a logarithmic axis
SERIES = 6  # colours of `charts.html.jinja`; then they repeat with other dashes
CHARTS = 8  # most metrics that are drawn
PARTS = {"train": "training", "eval": "evaluation"}
_FIRST = ("loss", "accuracy")
_LETTER = 7.8  # pixels of a wide letter
_LINE = 14.0  # pixels of a line of labels
_MOST = 260  # points of a curve; longer ones keep minima and maxima
_DOTS = 40  # most points with dots
_WIDEST = 1e100  # a wider logarithmic axis cannot have ticks
_SECONDS = (
    (1e-3, "ms", (1, 10, 100)),
    (1.0, "s", (1, 2, 5, 10, 20, 30)),
    (60.0, "min", (1, 2, 5, 10, 20, 30)),
    (3600.0, "h", (1, 2, 4, 8, 16)),
    (86_400.0, "d", (1, 2, 4, 7, 14, 30, 60, 120, 365, 1000, 3650, 10_000, 36_500)),
)

Pixels = tuple[float, float]


# ---- axes


class Tick(NamedTuple):
    """A number on an axis: its position and its label."""

    at: float
    label: str


def spread_out(values: Sequence[float], factor: float) -> bool:
    """Whether a logarithmic axis is better: all values are positive, and their ratio is above
    `factor`, but not too large for ticks."""
    return bool(values) and min(values) > 0 and factor < max(values) / min(values) < _WIDEST


def steps(low: float, high: float, most: int) -> list[float]:
    """At most about `most` multiples of 1, 2 or 5 times a power of ten within an interval."""
    if not high > low:
        return [low]
    raw = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_steps(low: float, high: float, most: int) -> list[float]:
    """The powers of ten within an interval above 0. Adds multiples by 2 and 5, or by 3, if there is
    room. Leaves powers out if there are too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        values = [d * 10.0**p for p in powers for d in digits if low <= d * 10.0**p <= high]
        if len(values) <= most:
            return values
    return values[:: math.ceil(len(values) / most)]


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels, or percent, between `start` and `end`. Clips values outside."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    unit: str = ""
    """Selects the steps and the format of ticks: "" for numbers, "s" for seconds, "$" for
    dollars."""

    @classmethod
    def around(
        cls,
        values: Sequence[float],
        start: float,
        end: float,
        *,
        zero: bool = False,
        log: bool = False,
        unit: str = "",
    ) -> Axis:
        """An axis around values, with a margin. It begins at 0 if `zero` is true and no value is
        negative."""
        low = min(values)
        high = max(values)
        if log:
            room = max((high / low) ** 0.05, 1.1)
            return cls(low / room, high * room, start, end, True, unit)
        low = min(low, 0.0) if zero else low
        room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(low if zero and low == 0 else low - room, high + room, start, end, False, unit)

    def __call__(self, value: float) -> float:
        scale = math.log if self.log else float
        low = scale(self.low)
        span = scale(self.high) - low
        share = (scale(max(value, self.low)) - low) / span if span > 0 else 0.5
        return self.start + (self.end - self.start) * min(share, 1.0)

    def ticks(self, most: int) -> list[Tick]:
        """At most about `most` round values, each label once."""
        if self.unit == "s" and self.log:
            named = [(n * size, f"{n} {unit}") for size, unit, counts in _SECONDS for n in counts]
            named = [(v, label) for v, label in named if self.low <= v <= self.high]
            named = named or [
                (v, f"{short(v / 86_400)} d") for v in log_steps(self.low, self.high, most)
            ]
        elif self.unit == "s":
            size, unit, _ = next(
                (u for u in reversed(_SECONDS) if self.high >= 2 * u[0]), _SECONDS[0]
            )
            marks = steps(self.low / size, self.high / size, most)
            named = [(v * size, f"{short(v)} {unit}" if v else "0") for v in marks]
        else:
            marks = (log_steps if self.log else steps)(self.low, self.high, most)
            named = [(v, short(v)) for v in marks]
            if self.unit == "$":
                named = [
                    (v, f"${v:,.0f}" if v >= 1 else dollars(v) if v >= 0.1 else f"${v:.1g}")
                    for v in marks
                ]
        ticks = [Tick(self(v), label) for v, label in named]
        least = abs(self.end - self.start) / (2.0 * most)
        kept: list[Tick] = []
        for tick in ticks:
            if not kept or (abs(tick.at - kept[-1].at) >= least and tick.label != kept[-1].label):
                kept.append(tick)
        return kept


# ---- curves


@dataclass(frozen=True)
class Trace:
    """A curve."""

    name: str
    style: str
    """Words of `charts.html.jinja`, such as "train", "s0 faint" or `style_of(k)`. "dots" draws
    points without a line."""
    points: Sequence[tuple[float, float]]
    aside: bool = False
    """The axes ignore this curve, and it is clipped."""
    labels: Sequence[str] = ()
    """A name for each point."""


class Line(NamedTuple):
    """A curve as an SVG path ("" for one point), and as dots if there are few points."""

    name: str
    style: str
    path: str
    dots: list[Pixels]


class Label(NamedTuple):
    """A name above a point: the middle of its line."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Plot:
    """Curves over a pair of axes, in pixels."""

    width: int
    height: int
    left: float
    top: float
    right: float
    bottom: float
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    second: list[Tick]
    """Ticks below those of x, in another unit."""
    y_log: bool
    lines: list[Line]
    labels: list[Label]
    marks: list[float]
    """Vertical lines."""
    level: float | None
    """The height of a horizontal line."""


@dataclass(frozen=True)
class Panel:
    """A plot with its title, labels and key.

    *Fields:*

    - `x` and `y`: labels of the axes.
    - `x_unit` and `y_unit`: as in `Axis`.
    - `zero`: a linear y axis begins at 0.
    - `second`: the name of another unit of x, and its number per unit of x.
    - `marks`: values of x with a vertical line. `mark_words` describes them.
    - `level`: a value of y with a horizontal line. `level_words` describes it.
    """

    title: str
    curves: Sequence[Trace]
    x: str = "step"
    y: str = ""
    caption: str = ""
    x_unit: str = ""
    y_unit: str = ""
    x_log: bool = False
    y_log: bool = False
    zero: bool = False
    second: tuple[str, float] | None = None
    marks: Sequence[float] = ()
    mark_words: str = ""
    level: float | None = None
    level_words: str = ""

    @property
    def below(self) -> str:
        """The labels of the axes."""
        up = f"; upwards {self.y}{' (logarithmic)' * self.y_log}" if self.y else ""
        unnamed = "; logarithmic" * (self.y_log and not self.y)
        return f"{self.x}{' (logarithmic)' * self.x_log}{up}{unnamed}"

    @property
    def words(self) -> str:
        """A description for screen readers."""
        ends = [
            (c.name or self.title, short(c.points[0][1]), short(c.points[-1][1]))
            for c in [c for c in self.curves if c.name] or self.curves
        ]
        return f"{self.title}. {'; '.join(f'{name}: {a} to {b}' for name, a, b in ends[:8])}."

    @property
    def key(self) -> dict[str, str]:
        """The style of each named curve, then those of the level and the marks."""
        styles = {c.name: c.style for c in self.curves}
        styles |= {self.level_words: "level", self.mark_words: "mark"}
        return {name: style for name, style in styles.items() if name}

    def plot(self, width: int, height: int) -> Plot:
        left = 58.0
        top = 12.0
        right = width - 14.0
        bottom = height - (60.0 if self.second else 44.0)
        xs, ys = _values(self.curves, self.level)
        low = min(xs) if self.x_log else min(*xs, 0.0)
        across = Axis(
            low, max(xs) if max(xs) > low else low + 1, left, right, self.x_log, self.x_unit
        )
        up = Axis.around(ys, bottom, top, zero=self.zero, log=self.y_log, unit=self.y_unit)
        many = max(width // 95, 3)
        each = self.second[1] if self.second else 0.0
        return Plot(
            width=width,
            height=height,
            left=left,
            top=top,
            right=right,
            bottom=bottom,
            x_ticks=across.ticks(many),
            y_ticks=up.ticks(6),
            second=Axis(low * each, across.high * each, left, right).ticks(many) if each else [],
            y_log=self.y_log,
            lines=[_line(c, across, up, len(self.curves) > 4) for c in self.curves],
            labels=_labels(self.curves, across, up),
            marks=[across(m) for m in self.marks],
            level=None if self.level is None else up(self.level),
        )


def panel(
    title: str, curves: Sequence[Trace], *, x_log: bool = False, y_log: bool = False, **how: Any
) -> Panel | None:
    """A plot in both sizes, or `None` if there are no points.

    *Arguments:* `x_log` and `y_log`: the axis is logarithmic if its values span more than
    `LOG_FROM`. Others are fields of `Panel`.
    """
    curves = [replace(c, points=thinned(c.points)) for c in curves]
    curves = [c for c in curves if c.points]
    if not curves:
        return None
    xs, ys = _values(curves, how.get("level"))
    marks = [m for m in how.pop("marks", ()) if min(*xs, 0.0) <= m <= max(xs)]
    words = how.pop("mark_words", "") * bool(marks)
    return Panel(
        title,
        curves,
        x_log=x_log and spread_out(xs, LOG_FROM),
        y_log=y_log and spread_out(ys, LOG_FROM),
        marks=marks,
        mark_words=words,
        **how,
    )


def _values(curves: Sequence[Trace], level: float | None) -> tuple[list[float], list[float]]:
    """The values of x and y that determine the axes."""
    points = [p for c in [c for c in curves if not c.aside] or curves for p in c.points]
    return [p[0] for p in points], [p[1] for p in points] + ([] if level is None else [level])


def style_of(k: int) -> str:
    """The style of the k-th row."""
    return f"s{k % SERIES} dash{k // SERIES % 3}"


def _line(curve: Trace, across: Axis, up: Axis, crowded: bool) -> Line:
    at = [(across(a), up(b)) for a, b in curve.points]
    scattered = "dots" in curve.style.split()
    path = (
        "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in at) if len(at) > 1 and not scattered else ""
    )
    dots = at if not path or (len(at) <= _DOTS and not crowded) else []
    return Line(curve.name, curve.style + " many" * crowded, path, dots)


def _labels(curves: Sequence[Trace], across: Axis, up: Axis) -> list[Label]:
    """The labels of all points, lowest first. One that would cover another moves up."""
    named = [
        (across(x), up(y) - 9, text)
        for curve in curves
        for (x, y), text in zip(curve.points, curve.labels, strict=False)
    ]
    placed: list[Label] = []
    for x, y, text in sorted(named, key=lambda one: -one[1]):
        half = _LETTER * len(text) / 2
        x = min(max(x, across.start + half), across.end - half)
        while any(
            abs(x - other.x) < half + _LETTER * len(other.text) / 2 and abs(y - other.y) < _LINE
            for other in placed
        ):
            y -= _LINE
        if y > -48:  # the title's room; of many points in one place the table has the names
            placed.append(Label(x, y, text))
    return placed


def thinned(points: Iterable[Sequence[float]]) -> list[tuple[float, float]]:
    """The finite points, at most about `_MOST`. Each stretch keeps its lowest and its highest
    point, so no peak is lost."""
    finite = [(p[0], p[1]) for p in points if known(p[0]) and known(p[1])]
    if len(finite) <= _MOST:
        return finite
    size = math.ceil(2 * len(finite) / _MOST)
    kept: list[tuple[float, float]] = []
    for at in range(0, len(finite), size):
        stretch = finite[at : at + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept


def metric_panels(
    curves: Mapping[str, Sequence[tuple[Any, Any]]], over: str = "steps", **how: Any
) -> Iterator[Panel]:
    """A plot for each of the first `CHARTS` metrics, of training and evaluation together.

    *Arguments:* `curves`: points by names such as "train/loss". `over`: the word for x in the
    titles. Others are as in `panel`.
    """
    for name in metric_names(curves)[:CHARTS]:
        both = [Trace(PARTS[part], part, curves.get(f"{part}/{name}", ())) for part in PARTS]
        drawn = panel(f"{name} over {over}", both, y_log="loss" in name, **how)
        if drawn is not None:
            yield drawn


def metric_names(curves: Iterable[str]) -> list[str]:
    """The metrics of names such as "train/loss": loss and accuracy, then by name."""
    names = {name.partition("/")[2] for name in curves}
    first = [name for name in _FIRST if name in names]
    return [*first, *sorted(names.difference(first))]
