"""The templates of pages, which all extend `base.html.jinja`."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jinja2


def template(
    package: str, filters: Mapping[str, Callable[..., Any]], finalize: Callable[[Any], Any] | None = None
) -> jinja2.Template:
    """`page.html.jinja` of `package`, with `filters` beside `digest` and `px`; everything is escaped."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader(package, ""), jinja2.PackageLoader("chipwise.explain.page", "")]
        ),
    )
    environment.filters |= {"digest": _digest, "px": lambda pixels: f"{pixels:.1f}", **filters}
    return environment.get_template("page.html.jinja")


def _digest(script: str) -> str:
    """The script's hash as a content security policy names it."""
    return base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode()
