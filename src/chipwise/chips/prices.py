"""Prices of an hour of a target: dated list prices, a user's own file, owned hardware.

A price is a row of a CSV file: the bundled `prices.csv`, or a file of the same columns.

    chip,chips,cloud,instance,region,usd_per_hour,spot_usd_per_hour,spot_region,includes,...
    a100,8,aws,p4d.24xlarge,us-east-1,21.957642,,,whole VM,...

The last columns are `source`, `date` and `note`.

- `chip` is any name of the catalogue, `chips` how many the price is for, `region` where the
  on-demand price is lowest, `spot_region` where the spot price is.
- `includes`: `accelerator alone` (its host is another row, or unknown), `whole VM`,
  `slice with its host` (TPU VMs), or `owned`, the cost of an hour of your own hardware.
- `source` and `date` are never empty. A date may say more than a day ("2026-02-26..2026-03-15
  (inferred)"). The first day in it counts.
- Empty prices are unknown. Nothing is free: a price of 0 is an error.
"""

from __future__ import annotations

import csv
import datetime
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..base import DataError, Fact, fact, near
from ..base.annotations import as_annotated
from ..base.files import read_regular
from .catalogue import NAMES, called, named
from .targets import Target, parse

OWNED = "owned"
INCLUDES = ("accelerator alone", "whole VM", "slice with its host", OWNED)
OLD_DAYS = 90
"""The age in days above which a price may have changed. A verdict that such a price decides says
so."""
LARGE = ("aws", "azure", "gcp")
"""The clouds whose prices decide a verdict where they have the chip: anybody can rent there at any
time."""


@dataclass(frozen=True)
class Price:
    """One listed price of `chips` chips together. `None` is unknown."""

    chip: str  # `Chip.name`
    chips: int
    cloud: str
    instance: str
    region: str
    usd_per_hour: float | None  # on demand, of all the chips
    spot_usd_per_hour: float | None
    spot_region: str
    includes: str  # one of `INCLUDES`
    source: str
    date: str
    note: str
    machines: int = 1  # more: an estimate, this many times the price of one; not a column
    reckoned: tuple[Fact, ...] = ()  # how it follows from the row; not a column

    @property
    def day(self) -> datetime.date:
        """The first day in its date, or the first of the month if there is no day."""
        return _day(self.date)

    def old(self, today: datetime.date, spot: bool = False) -> bool:
        """Whether it was read more than `OLD_DAYS` days before `today`. A spot price may have its
        own date."""
        day = _spot_day(self.date) if spot else self.day
        return (today - day).days > OLD_DAYS

    @property
    def market(self) -> bool:
        """Whether it is the lowest offer of a marketplace, a single machine that may soon be
        taken."""
        return "marketplace" in self.cloud.lower() or "offer" in self.region.lower()

    @property
    def has_host(self) -> bool:
        """Whether the price includes a host."""
        return self.includes != "accelerator alone"

    @property
    def owned(self) -> bool:
        """Whether it is the cost of owned hardware."""
        return self.includes == OWNED


_DATE = re.compile(r"(\d{4})-(0[1-9]|1[0-2])(?:-(0[1-9]|[12]\d|3[01]))?(?!-?\d)")


def _day(text: str) -> datetime.date:
    """The first day in a text. Raises `ValueError` if there is none."""
    match = _DATE.search(text)
    if match is None:
        raise ValueError(f"no date: {text}")
    return datetime.date(int(match[1]), int(match[2]), int(match[3] or 1))


def _spot_day(text: str) -> datetime.date:
    """The day of the spot price in a text."""
    own = text.partition("spot")[2]
    return _day(own if _DATE.search(own) else text)


_TEXTS = ("cloud", "instance", "region", "spot_region", "source", "date", "note")
COLUMNS = tuple(f.name for f in fields(Price) if f.name not in ("machines", "reckoned"))


@as_annotated
def load(path: str | Path | None = None) -> tuple[Price, ...]:
    """The bundled prices, or those of the CSV file at `path`.

    Raises `DataError` with file and line if the file is missing or not UTF-8, or a row is invalid:
    a missing or unknown column, no source or date, a bad number, a chip that is not in the
    catalogue.
    """
    if path is None:
        bundled = files(__package__).joinpath("prices.csv")
        return read(bundled.read_text(encoding="utf-8"), "prices.csv")
    try:
        text = read_regular(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        sentence = "{path}: cannot be read as text ({error:plain})."
        raise DataError("prices-unreadable", sentence, path=str(path), error=str(error)) from None
    return read(text, str(path))


def _rows(rows: csv.DictReader, first: _Line) -> Iterator[dict[Any, Any]]:
    try:
        yield from rows
    except csv.Error as error:
        line = replace(first, number=rows.line_num + 1)
        raise line.error("price-csv", "{reason:plain}.", reason=error) from None


def read(text: str, name: str) -> tuple[Price, ...]:
    """The prices in a CSV file's text. `name` is the file's name, for errors. Raises as `load`
    does."""
    rows = csv.DictReader(io.StringIO(text, newline=""), restval="")
    rows.fieldnames = header = [column.strip() for column in rows.fieldnames or ()]
    first = _Line(name, 1, {})
    for column in header:
        if column not in COLUMNS:
            hint = near(column, COLUMNS)
            known = COLUMNS
            sentence = "no column is called {column:plain}.{hint:near} Columns: {known:list}."
            raise first.error(
                "price-column-unknown", sentence, column=column, hint=hint, known=known
            )
    for column in ("chip", "chips", "source", "date", "usd_per_hour"):
        if column not in header:
            raise first.error(
                "price-column-missing", "the column {column} is missing.", column=column
            )
    prices = []
    for row in _rows(rows, first):
        line = _Line(
            name, rows.line_num, {k: (v or "").strip() for k, v in row.items() if k is not None}
        )
        if None in row:
            raise line.error(
                "price-cells", "more cells than columns; quote a cell that holds a comma."
            )
        prices.append(line.price())
    return tuple(prices)


@dataclass(frozen=True)
class _Line:
    """A row of a price file, and its position."""

    file: str
    number: int
    cells: Mapping[str, str]

    def error(self, code: str, sentence: str, **facts: Any) -> DataError:
        return DataError(
            code, "{file}, line {line}: " + sentence, file=self.file, line=self.number, **facts
        )

    def bad(self, column: str, expected: str) -> DataError:
        value = self.cell(column)
        sentence = "{column} is '{value:plain}': expected {expected:plain}."
        return self.error("price-cell", sentence, column=column, value=value, expected=expected)

    def cell(self, column: str) -> str:
        return self.cells.get(column, "")

    def amount(self, column: str) -> float | None:
        """A number, or `None` if the cell is empty."""
        text = self.cell(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value <= 0:
            raise self.bad(column, "a number more than 0, or nothing")
        return value

    def price(self) -> Price:
        chip = named(self.cell("chip") or "?")
        chips = self.cell("chips")
        includes = self.cell("includes")
        if chip is None:
            name = self.cell("chip")
            if several := [one.names[0] for one in called(name)]:
                sentence = "{chip:plain} is {names:and}. Type {names:or}."
                raise self.error("price-chip-ambiguous", sentence, chip=name, names=several)
            hint = near(name, NAMES)
            sentence = "no chip is named '{chip:plain}'.{hint:near} `chipwise chips` lists them."
            raise self.error("price-chip-unknown", sentence, chip=name, hint=hint)
        if not re.fullmatch(r"[0-9]+", chips) or int(chips) < 1:
            raise self.bad("chips", "a whole number of at least 1")
        if not self.cell("source"):
            raise self.bad("source", "where the price was read")
        try:
            _day(self.cell("date"))
            _spot_day(self.cell("date"))
        except ValueError:
            raise self.bad("date", "a day such as 2026-07-30") from None
        usd = self.amount("usd_per_hour")
        spot = self.amount("spot_usd_per_hour")
        if usd is None and spot is None:
            raise self.error("price-missing", "expected usd_per_hour or spot_usd_per_hour.")
        if includes not in INCLUDES:
            raise self.bad("includes", ", ".join(INCLUDES))
        texts: dict[str, Any] = {name: self.cell(name) for name in _TEXTS}
        texts["cloud"] = texts["cloud"] or (OWNED if includes == OWNED else "")
        return Price(
            chip=chip.name,
            chips=int(chips),
            includes=includes,
            usd_per_hour=usd,
            spot_usd_per_hour=spot,
            **texts,
        )


def text(prices: Iterable[Price]) -> str:
    """Prices as the text of a price file."""
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow(COLUMNS)
    for price in prices:
        writer.writerow(getattr(price, column) for column in COLUMNS)
    return made.getvalue()


def prices_for(target: Target, table: Sequence[Price]) -> list[Price]:
    """The prices of a target: first those of one machine, then estimates for several, each from the
    cheapest to unknown on-demand prices.

    If a cloud lists exactly its chips, that price is used. Otherwise a price is computed from the
    cloud's nearest row, as `reckoned` says:

    - For a TPU slice, in proportion to its chips, as slices are sold, from the row nearest in size.
      That matters on v2 and v3, where several boards cost more per chip.
    - For GPUs, as several machines with fewer: an estimate, without the network between them.

    A part of a machine has no price. A TPU core costs as much as the target that it is rented as.
    Prices of owned hardware are not scaled.
    """
    if target.rented_as:
        whole = parse(target.rented_as)
        how = fact("price-of-the-whole", whole=whole.name, target=target.name)
        return [replace(p, reckoned=(how, *p.reckoned)) for p in prices_for(whole, table)]
    rows = [price for price in table if price.chip == target.chip.name]
    prices = []
    for cloud in dict.fromkeys(price.cloud for price in rows):
        listed = [price for price in rows if price.cloud == cloud]
        exact = [price for price in listed if price.chips == target.chips]
        prices += exact or _scaled(target, listed)
    return sorted(prices, key=lambda price: (price.machines, price.usd_per_hour or math.inf))


def _scaled(target: Target, listed: Sequence[Price]) -> list[Price]:
    listed = [price for price in listed if not price.owned]
    if target.chip.kind == "TPU":
        if not listed:
            return []
        one = min(
            listed, key=lambda price: (abs(math.log(price.chips / target.chips)), price.chips)
        )
        how = fact("price-in-proportion", instance=one.instance)
        return [_times(one, target.chips / one.chips, how, target.name)]
    parts = [price for price in listed if target.chips % price.chips == 0]
    largest = max((price.chips for price in parts), default=1)
    n = target.chips // largest
    how = fact("price-of-machines", machines=n)
    return [_times(p, n, how, f"{n} x {p.instance}", n) for p in parts if p.chips == largest]


def _times(price: Price, factor: float, how: Fact, instance: str, machines: int = 1) -> Price:
    usd = price.usd_per_hour
    spot = price.spot_usd_per_hour
    return replace(
        price,
        chips=round(price.chips * factor),
        instance=instance,
        machines=machines,
        usd_per_hour=None if usd is None else usd * factor,
        spot_usd_per_hour=None if spot is None else spot * factor,
        reckoned=(how, *price.reckoned),
    )


def cheapest(prices: Iterable[Price], spot: bool = False) -> Price | None:
    """The lowest on-demand (or spot) price, or `None` if none is known.

    Complete machines come before accelerators without a host, and before several machines without a
    network between them, whatever the price.
    """

    def usd(price: Price) -> float | None:
        return price.spot_usd_per_hour if spot else price.usd_per_hour

    known = [price for price in prices if usd(price) is not None]
    return min(known, key=lambda p: (not p.has_host, p.machines, usd(p) or 0.0), default=None)
