"""Shows the parts of an answer as HTML: a page of its own, or a part of a notebook. Also draws
single pictures.

Names, settings and messages come from files and are not trusted. All text is escaped. A page's
content security policy allows no script and no requests.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from ..base.figures import UNKNOWN, printable
from .charts import Panel

SIZE = (370, 260)
"""Pixels of a plot: three beside each other on a desktop, one on a phone."""


def render(parts: Sequence[Any], document: Mapping[str, Any]) -> str:
    """A self-contained page of `parts`. The first part is its title. *Arguments:* `document`: says
    when it was made."""
    template = _environment().get_template("page.html.jinja")
    return template.render(parts=parts, document=document)


def fragment(parts: Sequence[Any]) -> str:
    """The parts for a notebook, which may strip style sheets and scripts."""
    shown = _macros("parts").shown(parts)
    return f'<div style="overflow-x:auto">{shown}</div>'


def picture(panel: Panel, size: tuple[int, int] = SIZE) -> str:
    """A panel as one SVG picture without a style sheet, on a transparent ground."""
    plot = panel.plot(*size)
    left = plot.left
    y = 30 + plot.height
    keys: list[tuple[float, float, str, str]] = []
    for name, style in panel.key.items():
        wide = 36 + 7 * len(name)  # the line, and a letter's usual width
        if keys and left + wide > plot.width:
            left = plot.left
            y = y + 18
        keys.append((left, y, style, name))
        left += wide
    height = y + 12 if keys else plot.height + 14
    return _macros("charts").picture(panel, plot, keys, height).strip() + "\n"


def _cleaned(value: Any) -> Any:
    """A value as a page shows it: foreign texts without what only looks like text."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return UNKNOWN if value is None else value
    if value.isascii() and value.isprintable():
        return value
    parts = re.split("([\n\t])", value)
    return "".join(part if part in "\n\t" else printable(part) for part in parts)


def _macros(name: str) -> Any:
    return _environment().get_template(f"{name}.html.jinja").module


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_cleaned,
        loader=jinja2.PackageLoader("chipwise.explain", "templates"),
    )
    environment.filters |= {
        "px": lambda pixels: f"{pixels:.1f}",
        "picture": picture,
        "rows": lambda table: zip(*(column.cells for column in table.columns), strict=True),
    }
    return environment
