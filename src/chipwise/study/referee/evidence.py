"""`rows` judges numbers that other programs made: two columns, paired by seed or not."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...base import DataError, RecipeError, fact, invalid, unknown
from ...base.annotations import as_annotated
from ...base.files import to_write
from ...data.pack.tables import is_number, table_rows
from ...recipe.direction import judged
from .ruling import Ruling, called, grain_of, room_of, size_of
from .sequential import interval, pairs_needed, runs_needed, unpaired
from .tries import KEY, Tries

SEED = "seed"
"""The column by which rows are paired."""

Numbers = str | Path | Sequence[float] | Mapping[int, float]


@dataclass(frozen=True)
class _Side:
    name: str
    values: dict[str, float]
    """The values by seed. Without seeds, by number of the row."""
    metric: str
    seeded: bool = True
    """Whether it says which rows of two sides are pairs."""


@as_annotated
def rows(
    base: Numbers,
    change: Numbers | None = None,
    *,
    by: str | None = None,
    metric: str | None = None,
    better: Mapping[str, str] = {},
    paired: bool = False,
    margin: float | str | None = None,
    error: float = 0.05,
    run: str | Path = "runs/referee",
) -> Ruling:
    """Judges results of other programs, a number for each run.

        cw.referee.rows("muon.csv", "soap.csv", metric="val_loss")
        cw.referee.rows([3.279, 3.277, 3.278, 3.28], [3.272, 3.274, 3.271, 3.273], metric="loss")

    The interval is that of `sequential.unpaired`, or with `paired` that of `sequential.interval`.
    It holds after every run, so the same call may be repeated whenever a row was added. The try
    then continues and keeps its level, as long as the earlier rows are still the first ones. Other
    rows are another try.

    *Arguments:*

    - `base`, `change`: a `.csv` file with a heading and a row for each run, or numbers in the order
      of the runs, or a dict from seeds to numbers. Numbers stay below 3.4e38.
    - `by`: of a single file, the column that says which side a row belongs to, and its two values:
      `"optimizer=muon,soap"`.
    - `metric`: the column to compare, if there are several. For numbers, their name.
    - `better`: the direction of the metric, `{"score": "higher"}`, if its name does not say it.
    - `paired`: compares runs with the same value in the column `seed`, or the same key. The first
      numbers of two lists are a pair, then the second ones, and so on.
    - `margin`, `error`, `run`: as in `referee`, which shares the book of tries.

    *Returns* the `Ruling`. Raises `RecipeError` for a metric or direction that is not known, and
    `DataError` for a file that cannot be read, a value that is no finite number, fewer than two
    rows, a seed that occurs twice, and with `paired` for sides of different seeds.
    """
    folder, began, size = Path(to_write(run, "run")).absolute(), time.monotonic(), size_of(margin)
    sides = _sides(base, change, by, metric)
    metric = sides[0].metric
    way = judged(metric, better)["better"]
    if paired:
        sides[1] = _same_seeds(*sides)
    first, second = both = [list(side.values.values()) for side in sides]
    low, high, needed, grain = -math.inf, math.inf, None, 0.0
    with contextlib.closing(Tries(folder, error)) as tries:
        looks = [_looks(paired, metric, one) for one in both]
        before = next((row for row in tries.rows if _continues(row, margin, looks)), {})
        digests = [before.get(side, own[-1]) for side, own in zip(KEY, looks, strict=False)]
        key = {"base": digests[0], "change": digests[1], "metric": metric, "margin": margin}
        level = tries.level(key)
        room = room_of(size, first)
        if paired:
            differences = [b - a for a, b in zip(first, second, strict=True)]
            grain = grain_of(differences, both)
            low, high = interval(differences, level, grain)
            needed = pairs_needed(differences, room, level, grain)
        else:
            grain = max(grain_of(one, both) for one in both)
            low, high = unpaired(first, second, level, grain)
            needed = runs_needed(first, second, room, level, grain)
        kind = called(low, high, room, way)
        bounds: dict[str, Any] = {"low": low, "high": high} if math.isfinite(high) else {}
        ruling = Ruling(
            kind,
            sides[0].name,
            sides[1].name,
            metric=metric,
            better=way,
            margin=room,
            values=list(itertools.zip_longest(first, second)),
            rows=None if paired else (len(first), len(second)),
            difference=statistics.fmean(second) - statistics.fmean(first),
            **bounds,
            level=level,
            needed=needed if kind == "open" else None,
            seconds=time.monotonic() - began,
            digests=(digests[0], digests[1]),
        )
        tries.write({**ruling.entry(margin), "looks": [one[-1] for one in looks]})
    return replace(ruling, tries=tries.summary())


def _looks(paired: bool, metric: str, values: Sequence[float]) -> list[str]:
    """Digests of a side at every look: after its first row, its second and so on."""
    growing, digests = hashlib.sha256(f"{paired} {metric}".encode()), []
    for value in values:
        growing.update(f" {value!r}".encode())
        digests.append(growing.hexdigest())
    return digests


def _continues(row: Mapping[str, Any], margin: float | str | None, looks: list[list[str]]) -> bool:
    """Whether a try of the book was a look at the first rows of both sides."""
    before = row.get("looks")
    if not isinstance(before, list) or len(before) != 2 or row.get("margin") != margin:
        return False
    return all(one in own for one, own in zip(before, looks, strict=True))


def _sides(
    base: Numbers, change: Numbers | None, by: str | None, metric: str | None
) -> list[_Side]:
    if by is None:
        if change is None:
            text = "{base} alone is one side: give a second file, or --by COLUMN=BASE,CHANGE."
            raise RecipeError("rows-one-side", text, base=str(base))
        first = _side(base, "base", metric)
        return [first, _side(change, "change", first.metric)]
    column, _, values = by.partition("=")
    one, _, other = values.partition(",")
    if change is not None or not isinstance(base, str | Path) or "" in (one, other) or one == other:
        raise invalid("rows-by", "by", by, "COLUMN=BASE,CHANGE of one file, optimizer=muon,soap")
    return [_table(base, metric, (column, value)) for value in (one, other)]


def _side(numbers: Numbers, name: str, metric: str | None) -> _Side:
    if isinstance(numbers, str | Path):
        return _table(numbers, metric)
    pairs = numbers.items() if isinstance(numbers, Mapping) else enumerate(numbers)
    values = {str(seed): float(value) for seed, value in pairs}
    for seed, value in values.items():
        if not is_number(str(value)):
            raise invalid("rows-number", name, value, "numbers below 3.4e38", row=seed)
    return _enough(_Side(name, values, metric or "value"))


def _table(path: str | Path, metric: str | None, only: tuple[str, str] | None = None) -> _Side:
    """The side of a file. *Arguments:* `only`: a column, and the value of the rows that count."""
    top, *rows = table_rows(Path(path))
    columns, name = top.cells, str(path)
    if len({*columns}) < len(columns):
        raise top.wrong(columns, "another name for each column")
    if only is not None:
        column, name = only
        if column not in columns:
            raise unknown("rows-column", f"column of {path}", column, columns)
        sides = {row.cells[columns.index(column)] for row in rows}
        if name not in sides:
            raise unknown("rows-side", column, name, sorted(sides))
        rows = [row for row in rows if row.cells[columns.index(column)] == name]
    left = [one for one in columns if one != SEED and (only is None or one != only[0])]
    if metric is None and len(left) == 1:
        metric = left[0]
    if metric not in left:
        if metric is not None:
            raise unknown("rows-metric", f"column of {path}", metric, left)
        text = "{path} has the columns {columns:and}: name the one to compare with --metric."
        raise RecipeError("rows-metrics", text, path=str(path), columns=left)
    values: dict[str, float] = {}
    for row in rows:
        seed, cell = (
            row.cells[columns.index(one)] if one in columns else str(row.line)
            for one in (SEED, metric)
        )
        if not is_number(cell):
            raise row.wrong(cell, f"a number of {metric} below 3.4e38, such as 3.28")
        if seed in values:
            raise row.wrong(seed, "each seed once: the same run twice is no second run")
        values[seed] = float(cell)
    return _enough(_Side(name, values, metric, SEED in columns))


def _enough(side: _Side) -> _Side:
    if len(side.values) < 2:
        text = "{name} has {rows:count row} of {metric}: expected at least 2, one for each run."
        rows = len(side.values)
        raise DataError("rows-few", text, name=side.name, rows=rows, metric=side.metric)
    return side


def _same_seeds(base: _Side, change: _Side) -> _Side:
    """The change in the order of the base's seeds."""
    for side in (base, change):
        if not side.seeded:
            text = "{name} says no seeds: give it a column seed, or leave out --paired."
            raise DataError("rows-no-seeds", text, name=side.name)
    here, there = ({*side.values} for side in (base, change))
    if here != there:
        only_base, only_change = sorted(here - there), sorted(there - here)
        text = "{side} alone has {seeds:few}"
        only = [(base, only_base), (change, only_change)]
        alone = [fact("rows-alone", text, side=s.name, seeds=seeds) for s, seeds in only if seeds]
        about = {"only_base": only_base, "only_change": only_change, "alone": alone}
        raise DataError("rows-other-seeds", base=base.name, change=change.name, **about)
    return replace(change, values={seed: change.values[seed] for seed in base.values})
