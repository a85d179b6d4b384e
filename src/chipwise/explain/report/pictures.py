"""Where everything stands in a report's pictures: plain numbers for a template to draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...engine.stored import number
from ...words.figures import sparkline
from ..charts import Tick, log_steps, spread_out, steps
from .time import PARTS
from .words import figure

WIDE, NARROW = (560, 270), (328, 240)  # pixels of a chart on a desk and on a telephone
ACROSS = 840  # of one over the whole width of a page
LOG_FROM = 30.0  # highest over lowest value, from which a loss is drawn on a logarithmic axis
_LETTER = 7.0  # pixels of a letter of a label, about
_MOST = 260  # points of a line; beyond them the lowest and the highest of each stretch
_UNITS = ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """`kind` names its colour: "train", "eval", "rate", "seed". `dots` are drawn where points are few."""

    name: str
    kind: str
    path: str
    dots: list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """A chart in pixels. `level` is the height of a line across, such as a median; `marks` are resumes."""

    width: int
    height: int
    left: int
    top: int
    right: int
    bottom: int
    x_ticks: list[Tick]
    x_words: str
    second: list[Tick]  # the same axis in epochs, or none
    y_ticks: list[Tick]
    log: bool
    lines: list[Line]
    marks: list[float] = field(default_factory=list)
    level: float | None = None


@dataclass(frozen=True)
class Row:
    """A point's values in a strip: its mean and interval, where they are known, and a dot a seed. `label` is
    the height of its name."""

    name: str
    kind: str
    y: float
    label: float
    dots: list[float]
    mean: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Strip:
    width: int
    height: int
    left: int
    right: int
    bottom: int
    x_ticks: list[Tick]
    rows: list[Row]
    words: str


@dataclass(frozen=True)
class Part:
    """A piece of the bar of time, in percent of it."""

    name: str
    words: str
    seconds: float
    share: float
    x: float


def chart(
    lines: Sequence[tuple[str, str, Points]],
    size: tuple[int, int],
    *,
    over: str = "steps",
    epochs_a_step: float | None = None,
    marks: Sequence[float] = (),
    level: float | None = None,
    zero: bool = False,
    log: bool = False,
) -> Chart | None:
    """Lines of (name, kind, points) over `over`, "steps" or "seconds"; `None` where there is no point.

    *Arguments:* `zero`: the axis starts at 0; `log`: it may be logarithmic, where the values span much.
    """
    kept = [(name, kind, thinned([p for p in points if _finite(p)])) for name, kind, points in lines]
    everything = [p for _, _, points in kept for p in points]
    if not everything:
        return None
    (width, height), left, top, right = size, 58, 12, size[0] - 14
    bottom = height - (58 if epochs_a_step else 42)
    values = [y for _, y in everything] + ([level] if level is not None else [])
    log = log and spread_out(values, LOG_FROM)
    low, high = _range(values, zero, log)
    end = max(x for x, _ in everything) or 1.0
    begin = 0.0

    def across(x: float) -> float:
        return left + (right - left) * (x - begin) / (end - begin)

    def up(y: float) -> float:
        part = (math.log(y / low) / math.log(high / low)) if log else (y - low) / (high - low)
        return bottom - (bottom - top) * part

    unit, words = (1.0, over)
    if over == "seconds":
        unit, words = next((u for u in _UNITS if end >= 2 * u[0]), _UNITS[-1])
    many = 6 if width > 400 else 4
    x_ticks = [Tick(across(x * unit), _short(x)) for x in steps(begin / unit, end / unit, many)]
    second = []
    if epochs_a_step:
        second = [Tick(across(e / epochs_a_step), _short(e)) for e in steps(0.0, end * epochs_a_step, many)]
    y_values = log_steps(low, high, 6) if log else steps(low, high, 5)
    drawn = [
        Line(
            name,
            kind,
            "M" + "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in points) if len(points) > 1 else "",
            [(across(x), up(y)) for x, y in points] if len(points) <= 40 else [],
        )
        for name, kind, points in kept
        if points
    ]
    return Chart(
        width, height, left, top, right, bottom, x_ticks, words, second,
        [Tick(up(y), _short(y)) for y in y_values], log, drawn,
        [across(m) for m in marks if begin <= m <= end],
        up(level) if level is not None and low <= level <= high else None,
    )  # fmt: skip


def strip(
    rows: Sequence[tuple[str, str, Sequence[float], Mapping[str, Any] | None]], width: int
) -> Strip | None:
    """Rows of (name, kind, values, spread as in `Spread`) on one axis; `None` without values."""
    ends = [v for _, _, values, _ in rows for v in values]
    ends += [s[n] for _, _, _, s in rows if s for n in ("low", "high") if s[n] is not None]
    if not ends:
        return None
    low, high = _range(ends, zero=False, log=False)
    names = math.ceil(_LETTER * max(len(name) for name, *_ in rows))
    beside = names <= 0.4 * width  # else each name has a line of its own
    left, right = names + 24 if beside else 14, width - 14
    pitch, up = (34, 17) if beside else (46, 12)
    bottom = pitch * len(rows) + 6

    def across(x: float) -> float:
        return left + (right - left) * (x - low) / (high - low)

    drawn = []
    for k, (name, kind, values, s) in enumerate(rows):
        interval = (across(s["low"]), across(s["high"])) if s and s["low"] is not None else None
        at = [across(v) for v in values]
        y = float(pitch * (k + 1) - up)
        label = y + 4 if beside else y - 16
        drawn.append(Row(name, kind, y, label, at, across(s["mean"]) if s else None, interval))
    words = "; ".join(
        f"{name}: {', '.join(figure(v) for v in values) or 'none'}" for name, _, values, _ in rows
    )
    ticks = [Tick(across(x), _short(x)) for x in steps(low, high, 6 if width > 400 else 4)]
    return Strip(width, bottom + 26, left, right, bottom, ticks, drawn, words)


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most some `_MOST` points: of each stretch its lowest and its highest, so that no peak is lost."""
    if len(points) <= _MOST:
        return list(points)
    size = math.ceil(2 * len(points) / _MOST)
    kept: list[tuple[float, float]] = []
    for at in range(0, len(points), size):
        stretch = points[at : at + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept


def bar(time: Mapping[str, Any]) -> list[Part]:
    """The parts of a report's `seconds`, one after another."""
    total = sum(time["parts"].values()) or 1.0
    made, at = [], 0.0
    for name, words in PARTS.items():
        value = time["parts"].get(name)
        if value:
            made.append(Part(name, words, value, value / total, at))
            at += 100 * value / total
    return made


def spark(values: Sequence[float], width: int = 24) -> str:
    """A curve as one line of text, lowest to highest: `█▆▄▂▁`; on logarithms where the values span much."""
    if not values:
        return ""
    if spread_out(values, LOG_FROM):
        values = [math.log(v) for v in values]
    size = max(len(values) / width, 1.0)
    cells = [
        values[int(k * size) : max(int((k + 1) * size), int(k * size) + 1)]
        for k in range(int(len(values) / size))
    ]
    means = [sum(cell) / len(cell) for cell in cells if cell]
    return sparkline(means)


def _range(values: Sequence[float], zero: bool, log: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        room = (high / low) ** 0.05
        return low / room, high * room
    if zero:
        low = min(low, 0.0)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return (low if zero and low == 0 else low - room), high + room


def _short(value: float) -> str:
    """A tick: `0.05`, `2k`, `1.5M`."""
    value = float(f"{value:.10g}")  # not 0.30000000000000004
    if 1e6 <= abs(value) < 1e9:
        return f"{value / 1e6:.4g}M"
    return f"{value / 1e3:.4g}k" if 1e4 <= abs(value) < 1e6 else figure(value)


def _finite(point: tuple[Any, Any]) -> bool:
    return all(number(x) is not None for x in point)
