"""What answers have in common: printed, and in a notebook, they are tables and pictures."""

from __future__ import annotations


class Displayed:
    """An answer that `print` shows as tables, and a notebook as tables and pictures: `explain.display`."""

    def __str__(self) -> str:
        from ..explain.display import shown

        return shown(self).text

    def _repr_html_(self) -> str:
        from ..explain.display import shown

        return shown(self)._repr_html_()
