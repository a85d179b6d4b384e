"""Published training speeds for the models of built-in recipes, each with its source and date.

`published.csv` has a row for each figure. `chipwise compare` labels these rows as published everywhere.

- `examples_per_second` is global, of all the chips of the row, at the global `batch`.
- `low` and `high` are the range of `examples_per_second` that the source states, over its runs or within one.
- `similar` says how the model, its input or its data differ from the recipe's; empty if they do not.
- `accuracy` are the final evaluations of its runs, as shares.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

from ..chips.catalogue import cell


@dataclass(frozen=True)
class Published:
    """A row of `published.csv`. `None` and `""`: unknown, or not applicable."""

    recipe: str  # name of the built-in recipe whose model it is
    label: str
    target: str  # for `chips.targets.parse`; "" if the catalogue lacks the chips
    device: str
    framework: str
    precision: str
    batch: int | None  # global
    replicas: int | None
    examples_per_second: float
    low: float | None
    high: float | None
    accuracy: tuple[float, ...]
    similar: str
    source: str
    date: str
    note: str

    def matches(self, words: str) -> bool:
        """Whether its description contains all `words`, ignoring case."""
        names = ("recipe", "label", "target", "device", "framework", "precision", "date")
        text = " ".join(getattr(self, name) for name in names).lower()
        return all(word in text for word in words.lower().split())


@cache
def table() -> tuple[Published, ...]:
    """All rows, in the file's order."""
    text = files(__package__).joinpath("published.csv").read_text(encoding="utf-8")
    types = {f.name: str(f.type) for f in fields(Published)}
    rows = csv.DictReader(text.splitlines())
    return tuple(Published(**{name: cell(types[name], row[name]) for name in types}) for row in rows)


def rows_for(recipe: str | None, words: str = "") -> tuple[Published, ...]:
    """The rows of a recipe (`None`: all) that contain all `words`."""
    return tuple(row for row in table() if recipe in (None, row.recipe) and row.matches(words))
