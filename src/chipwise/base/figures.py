"""Numbers as text, in the same form everywhere."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

UNKNOWN = "unknown"
_LONGEST = 400  # characters of a text from a file


def known(value: Any) -> TypeGuard[float]:
    """Whether `value` is a number below 1e300, so that sums stay finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def or_unknown(form: Callable[[Any], str]) -> Callable[[Any], str]:
    """`form`, but "unknown" for values that are not `known`."""
    return lambda value: form(value) if known(value) else UNKNOWN


# ---- numbers


def digits(value: float) -> str:
    """Three digits, never an exponent: `0.0123`, `4.56`, `1,235`. A value that is not finite is
    `unknown`."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else UNKNOWN
    places = max(2 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{min(places, 6)}f}"


def figure(value: float) -> str:
    """Four digits: `0.9694`, `38,790`, `1.2e-05`."""
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.3g}"


def short(value: float) -> str:
    """A label of an axis: `0.05`, `350`, `12k`, `1.5M`."""
    value = float(f"{value:.10g}")  # not 0.30000000000000004
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e12:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return figure(value)


def share(value: float) -> str:
    """`21 %`. Below a tenth, two digits: `3.4 %`. Below a thousandth, `< 0.1 %`."""
    if 0 < value < 1e-3:
        return "< 0.1 %"
    return f"{100 * value:.0f} %" if abs(value) >= 0.1 or value == 0 else f"{100 * value:.2g} %"


def byte_size(nbytes: float) -> str:
    """Bytes in decimal units: `1.81 GB`, `410 MB`, `96 bytes`."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= unit:
            return f"{digits(nbytes / unit)} {name}"
    return f"{nbytes:.0f} bytes"


def duration(seconds: float) -> str:
    """`4.2 s`, `3.1 min`, `7.5 h` or `2.3 d`."""
    for unit, name, least in ((86_400, "d", 2 * 86_400), (3600, "h", 3600), (60, "min", 60)):
        if seconds >= least:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.3g} s"


def dollars(usd: float) -> str:
    """`$12.30`. Below a cent, two digits: `$0.0024`."""
    if usd >= 0.01 or usd <= 0:
        return f"${usd:,.2f}"
    return f"${usd:.{min(1 - math.floor(math.log10(usd)), 9)}f}"


def interval(
    span: Mapping[str, Any] | None, form: Callable[[float], str] = digits, between: str = " to "
) -> str:
    """`1.9 to 2.3`, from `low` and `high`. Empty if one is unknown."""
    if not span or not known(span.get("low")) or not known(span.get("high")):
        return ""
    return f"{form(span['low'])}{between}{form(span['high'])}"


def pair(span: Mapping[str, Any] | None, form: Callable[[float], str] = digits) -> str:
    """`6.0 and 16.0`, from exactly two `values`, which are too few for an interval. Otherwise
    empty."""
    if not span or span.get("n") != 2 or interval(span):
        return ""
    return " and ".join(form(v) for v in sorted(span["values"]))


def spread(span: Mapping[str, Any], form: Callable[[float], str] = digits) -> str:
    """`5.1 (4.9 to 5.3)`: a value with its interval, or with both of two values, or alone."""
    within = interval(span, form)
    if two := pair(span, form):
        within = f"{two}; 2 runs are too few for an interval"
    return form(span["value"]) + (f" ({within})" if within else "")


def price(cost: Mapping[str, Any]) -> str:
    """A price on one line, with all its details, date and source."""
    kind = "spot" if cost.get("spot") else "on demand"
    parts = [
        f"{dollars(cost['usd_per_hour'])} an hour {kind}"
        if known(cost.get("usd_per_hour"))
        else kind,
        " ".join(str(cost[k]) for k in ("cloud", "instance", "region") if cost.get(k)),
        cost.get("includes"),
        *(reckoning["text"] for reckoning in cost.get("reckoned") or ()),
        cost.get("note"),
        cost.get("date") or "date unknown",
        cost.get("source") or "source unknown",
    ]
    return ", ".join(str(p) for p in parts if p)


# ---- words


def counted(n: int, what: str) -> str:
    """`1 step`, `1,437 steps`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def listed(words: Iterable[Any], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`. `none` if empty."""
    *first, end = [str(word) for word in words] or ["none"]
    return f"{', '.join(first)} {last} {end}" if first else end


def few(words: Sequence[str], most: int = 3) -> str:
    """The first `most` and the number of the others: `a, b, c and 1,204 more`. Safe on one line."""
    more = len(words) - most
    return ", ".join(printable(str(word)) for word in words[:most]) + (
        f" and {more:,} more" if more > 0 else ""
    )


def sparkline(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """One block per value: `█▆▄▂▁`, from `low`, by default the lowest value, to `high`, by default
    the highest."""
    if not values:
        return ""
    low, high = min(values) if low is None else low, max(values) if high is None else high
    top = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[round((v - low) / (high - low) * top) if high > low else top // 2] for v in values
    )


_BLOCKS = "▁▂▃▄▅▆▇█"


def printable(text: str) -> str:
    """A text from a file, or a file's name, with control characters escaped, so that one line can
    show it."""
    text = text.encode("utf-8", "replace").decode()
    # A line break could forge a line of a report, and an escape sequence could control the
    # terminal.
    kinds = ("Cc", "Cf", "Cn", "Zl", "Zp")
    escaped = (
        c.encode("unicode_escape").decode() if unicodedata.category(c) in kinds else c for c in text
    )
    return "".join(escaped)


def without_secrets(text: str) -> str:
    """`text` without the passwords and the signatures of the addresses in it."""
    return re.sub(r"//[^/\s@]*@", "//", re.sub(r"\?\S*", "", text))


def one_line(value: Any, longest: int = _LONGEST) -> str:
    """`printable` of a text, with spaces for line breaks, and shortened to `longest` characters."""
    text = printable(" ".join(str(value).split()))
    return text if len(text) <= longest else text[: longest - 1] + "…"
