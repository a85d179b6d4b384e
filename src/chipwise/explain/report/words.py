"""Numbers and foreign text as a report prints them, on the page and in the terminal."""

from __future__ import annotations

import shlex
from typing import Any

from ...engine.stored import number
from ...words.figures import counted, duration

UNKNOWN = "unknown"
_LONGEST = 400  # characters of a text that a file brought


def plain(value: Any) -> str:
    """`value` as one line that can be printed: a file's text may hold what moves a terminal's cursor."""
    text = "".join(c if c.isprintable() else "�" for c in " ".join(str(value).split()))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def figure(value: Any) -> str:
    """Four digits: `0.9694`, `38,790`, `1.2e-05`."""
    found = number(value)
    if found is None:
        return UNKNOWN
    if found == 0 or 1e-3 <= abs(found) < 1e3:
        return f"{found:.4g}"
    return f"{found:,.0f}" if 1e3 <= abs(found) < 1e9 else f"{found:.3g}"


def metric(value: float | None) -> str:
    """A metric of a report, which is `None` where it is not finite: JSON has no NaN."""
    return "NaN" if value is None else figure(value)


def share(value: Any) -> str:
    """`21 %`; below a tenth one digit more, `3.4 %`, and below a thousandth `< 0.1 %`."""
    found = number(value)
    if found is None:
        return UNKNOWN
    if 0 < found < 1e-3:
        return "< 0.1 %"
    return f"{100 * found:.0f} %" if abs(found) >= 0.1 or found == 0 else f"{100 * found:.2g} %"


def seconds(value: Any) -> str:
    """`0.34 s`, `42 s`, `3.1 min`, `7.5 h` or `2.3 d`."""
    found = number(value)
    return UNKNOWN if found is None else duration(max(found, 0.0))


def beside(batch: Any, replicas: Any) -> str:
    """What stands beside every speed: `batch 512, 8 replicas`, global."""
    of = counted(replicas, "replica") if type(replicas) is int else "replicas unknown"
    return f"batch {batch if type(batch) is int else UNKNOWN}, {of}"


def command(*words: str) -> str:
    """Words as one line for a shell, quoted where they must be."""
    return shlex.join(plain(word) for word in words)
