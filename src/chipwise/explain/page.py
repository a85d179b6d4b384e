"""Renders pages with a common style, each a single self-contained HTML file; and pictures that stand alone.

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
from .charts import Panel

FILTERS: dict[str, Callable[..., Any]] = {
    # The script's hash, as in a content security policy
    "digest": lambda script: base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode(),
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
    return _environment(filters).get_template(f"{name}.html.jinja").render(**values)


def picture(panel: Panel, size: str = "wide") -> str:
    """A panel as one SVG picture without a style sheet, "wide" or "narrow", on a transparent ground."""
    plot = dict(panel.sizes)[size]
    left, y = plot.left, 30 + plot.height
    keys: list[tuple[float, float, str, str]] = []
    for name, style in panel.keys:
        wide = 36 + 7 * len(name)  # the line, and a letter's usual width
        if keys and left + wide > plot.width:
            left, y = plot.left, y + 18
        keys.append((left, y, style, name))
        left += wide
    template = _environment().get_template("charts.html.jinja")
    height = y + 12 if keys else plot.height + 14
    return template.module.picture(panel, plot, keys, height).strip() + "\n"  # type: ignore[attr-defined]


def _environment(filters: Mapping[str, Callable[..., Any]] | None = None) -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: UNKNOWN if value is None else value,
        loader=jinja2.PackageLoader("chipwise.explain", "templates"),
    )
    environment.filters |= {**FILTERS, **(filters or {})}
    return environment
