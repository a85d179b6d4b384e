"""Renders pages with a common style, each a single self-contained HTML file.

Names, settings and messages come from files and are not trusted: all text is escaped, and a page's content
security policy allows only its own script, and no requests. Unknown values read "unknown".
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jinja2

from ..words import figures
from ..words.figures import UNKNOWN, or_unknown

FILTERS: dict[str, Callable[..., Any]] = {
    "digest": lambda script: _digest(script),
    "px": lambda pixels: f"{pixels:.1f}",
    "price": figures.price,
    "digits": or_unknown(figures.digits),
    "figure": or_unknown(figures.figure),
    "whole": or_unknown(lambda value: f"{value:,.0f}"),
    "count": or_unknown(figures.count),
    "share": or_unknown(figures.share),
    "ms": or_unknown(lambda seconds: figures.digits(seconds * 1e3)),
    "bytes": or_unknown(figures.byte_size),
    "dollars": or_unknown(figures.dollars),
    "duration": or_unknown(lambda seconds: figures.duration(max(seconds, 0.0))),
}
"""What every template may apply to a number, beside what its page brings."""


def render(name: str, filters: Mapping[str, Callable[..., Any]] | None = None, /, **values: Any) -> str:
    """The page of `templates/NAME.html.jinja`, with `filters` in addition to `FILTERS`."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: UNKNOWN if value is None else value,
        loader=jinja2.PackageLoader("chipwise.explain", "templates"),
    )
    environment.filters |= {**FILTERS, **(filters or {})}
    return environment.get_template(f"{name}.html.jinja").render(**values)


def _digest(script: str) -> str:
    """The script's hash, as in a content security policy."""
    return base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode()
