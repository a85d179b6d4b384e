"""The common base of answers: printed as tables, and in a notebook as tables and pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Displayed:
    """An answer that `print` shows as tables, and a notebook as tables and pictures."""

    display: ClassVar[Callable[[Any], Any]]
    """Gives an answer's `text` and `_repr_html_`. `chipwise/__init__.py` sets it, since the code
    that shows answers is above the code that gives them."""

    def __str__(self) -> str:
        return self.display().text

    def _repr_html_(self) -> str:
        return self.display()._repr_html_()
