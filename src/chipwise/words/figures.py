"""Figures in words, the same wherever they are printed."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence


def digits(value: float) -> str:
    """Three digits, never an exponent: `0.0123`, `4.56`, `1,235`; `unknown` for what is not finite."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "unknown"
    places = max(2 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{min(places, 6)}f}"


def byte_size(nbytes: float) -> str:
    """Bytes: `1.81 GB`, `410 MB`, `96 bytes`; decimal units."""
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
    """`$12.30`; below a cent, two digits."""
    return f"${usd:,.2f}" if usd >= 0.01 or usd == 0 else f"${usd:.2g}"


def counted(n: int, what: str) -> str:
    """`1 step`, `1,437 steps`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`; `none` of nothing."""
    if len(words) < 2:
        return words[0] if words else "none"
    return f"{', '.join(words[:-1])} and {words[-1]}"


def few(words: Sequence[str], most: int = 3) -> str:
    """The first `most`, and how many more there are: `a, b, c and 1,204 more`; safe on one line."""
    more = len(words) - most
    return ", ".join(printable(str(word)) for word in words[:most]) + (
        f" and {more:,} more" if more > 0 else ""
    )


def sparkline(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """One block a value: `█▆▄▂▁`, from the lowest value, or `low`, to the highest, or `high`."""
    if not values:
        return ""
    low, high = min(values) if low is None else low, max(values) if high is None else high
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((v - low) / (high - low) * top) if high > low else top // 2] for v in values)


_BLOCKS = "▁▂▃▄▅▆▇█"


def printable(text: str) -> str:
    """What a file or its name says, which may hold any control character, as one line can show it."""
    text = text.encode("utf-8", "replace").decode()
    # A line break would forge a line of a report, and an escape sequence colours the terminal
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") else c
        for c in text
    )
