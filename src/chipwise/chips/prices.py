"""What an hour of a target costs: dated list prices, a user's own file, hardware one owns.

A price is a row of a CSV file: the bundled `prices.csv`, or a file of the same columns.

    chip,chips,cloud,instance,region,usd_per_hour,spot_usd_per_hour,spot_region,includes,source,date,note
    a100,8,aws,p4d.24xlarge,us-east-1,21.957642,,,whole VM,https://aws.amazon.com/ec2/pricing,2026-07-20,

- `chip` is any name of the catalogue, `chips` how many the price is for (1 host for `cpu`), `region` where
  the on-demand price is lowest, `spot_region` where the spot price is.
- `includes`: `accelerator alone` (its host is a row of its own, or unknown), `whole VM`, or `slice with its
  host` (TPU VMs).
- `source` and `date` are never empty. A date may say more than a day ("2026-02-26..2026-03-15 (inferred)");
  rows are ordered by the first one in it.
- Empty prices are unknown. Nothing is free: a price of 0 is an error.

Hardware one owns has `purchase_usd` and `years` instead of `usd_per_hour`, and optionally `power_watts`
with `usd_per_kWh`, and `utilisation`, the share of hours it is used (1 when not given).

Old prices stay in the table, for history, and are never used as today's: `prices_for` looks back
`LOOK_BACK_DAYS` from the newest row, or from the day it is asked for.
"""

from __future__ import annotations

import csv
import datetime
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path

from ..errors import DataError, nearest
from ..words.facts import Fact
from .catalogue import CHIPS, named
from .targets import Target, parse

INCLUDES = ("accelerator alone", "whole VM", "slice with its host")
LOOK_BACK_DAYS = 730
HOURS_A_YEAR = 24 * 365.25


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
    includes: str  # one of `INCLUDES`, or "owned: ..."
    source: str
    date: str
    note: str
    machines: int = 1  # more: an estimate, this many times the price of one; not a column
    reckoned: tuple[Fact, ...] = ()  # how it follows from what the row says; not a column

    @property
    def day(self) -> datetime.date:
        """The first day its date names; the first of the month where it names only that."""
        found = _DATE.search(self.date)
        if found is None:
            raise DataError(f"the price of {self.instance or self.chip} has no date such as 2026-07-30.")
        return datetime.date(int(found[1]), int(found[2]), int(found[3] or 1))

    @property
    def has_host(self) -> bool:
        """Whether nothing else must be paid to use it."""
        return self.includes != "accelerator alone"


_DATE = re.compile(r"(\d{4})-(0[1-9]|1[0-2])(?:-(0[1-9]|[12]\d|3[01]))?")
COLUMNS = tuple(f.name for f in fields(Price) if f.name not in ("machines", "reckoned"))
OWNED = ("purchase_usd", "years", "power_watts", "usd_per_kWh", "utilisation")


def load(path: str | Path | None = None) -> tuple[Price, ...]:
    """The bundled prices, or those of the CSV file at `path`.

    Raises `DataError`, naming file and line, for a file that is not there or not UTF-8, and for a row that
    is not a price: a column missing or unknown, no source or date, a bad number, a chip not in the catalogue.
    """
    if path is None:
        bundled = files(__package__).joinpath("prices.csv")
        return read(bundled.read_text(encoding="utf-8"), "prices.csv")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file of prices.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a UTF-8 text file ({error}).") from None
    return read(text, str(path))


def read(text: str, name: str) -> tuple[Price, ...]:
    """The prices of a CSV file's text; `name` is what errors call it. Raises as `load`."""
    rows = csv.DictReader(io.StringIO(text, newline=""), restval="")
    header = [column.strip() for column in rows.fieldnames or ()]
    for column in header:
        if column not in COLUMNS + OWNED:
            raise DataError(
                f"{name}, line 1: no column is called {column}.{nearest(column, COLUMNS + OWNED)} "
                f"Columns: {', '.join(COLUMNS)}; for owned hardware {', '.join(OWNED)}."
            )
    owned = "purchase_usd" in header
    for column in ("chip", "chips", "source", "date", "purchase_usd" if owned else "usd_per_hour"):
        if column not in header:
            raise DataError(f"{name}, line 1: the column {column} is missing.")
    rows.fieldnames = header
    found = []
    for row in rows:
        where = f"{name}, line {rows.line_num}"
        if None in row:
            raise DataError(f"{where}: more cells than columns; quote a cell that holds a comma.")
        found.append(_price({k: (v or "").strip() for k, v in row.items()}, where))
    return tuple(found)


def _price(row: Mapping[str, str], where: str) -> Price:
    chip = named(row["chip"]) if row["chip"] else None
    if chip is None:
        near = nearest(row["chip"], [name for chip in CHIPS for name in chip.names])
        raise DataError(f"{where}: no chip is named '{row['chip']}'.{near} `chipwise chips` lists them.")
    if not re.fullmatch(r"[0-9]+", row["chips"]) or int(row["chips"]) < 1:
        raise DataError(f"{where}: chips is '{row['chips']}': expected a whole number of at least 1.")
    if not row["source"]:
        raise DataError(f"{where}: source is empty: say where the price was read.")
    if not _DATE.search(row["date"]):
        raise DataError(f"{where}: date is '{row['date']}': expected a day such as 2026-07-30.")
    usd = _number(row, "usd_per_hour", where)
    spot = _number(row, "spot_usd_per_hour", where)
    includes, note = row.get("includes", ""), row.get("note", "")
    if row.get("purchase_usd"):
        if usd is not None or spot is not None:
            raise DataError(f"{where}: give purchase_usd or a price per hour, not both.")
        usd, arithmetic = _owned(row, where)
        includes = "owned: purchase and power" if row.get("power_watts") else "owned: purchase alone"
        note = "; ".join(part for part in (note, arithmetic) if part)
    else:
        if usd is None and spot is None:
            raise DataError(f"{where}: neither usd_per_hour nor spot_usd_per_hour is given.")
        if includes not in INCLUDES:
            raise DataError(f"{where}: includes is '{includes}': expected one of {', '.join(INCLUDES)}.")
    made = Price(
        chip=chip.name,
        chips=int(row["chips"]),
        cloud=row.get("cloud") or ("owned" if row.get("purchase_usd") else ""),
        instance=row.get("instance", ""),
        region=row.get("region", ""),
        usd_per_hour=usd,
        spot_usd_per_hour=spot,
        spot_region=row.get("spot_region", ""),
        includes=includes,
        source=row["source"],
        date=row["date"],
        note=note,
    )
    try:
        _ = made.day
    except ValueError:
        raise DataError(f"{where}: date is '{row['date']}': there is no such day.") from None
    return made


def _number(row: Mapping[str, str], column: str, where: str, *, zero: bool = False) -> float | None:
    text = row.get(column, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        least = "at least 0" if zero else "more than 0"
        raise DataError(f"{where}: {column} is '{text}': expected a number {least}, or nothing if unknown.")
    return value


def _owned(row: Mapping[str, str], where: str) -> tuple[float, str]:
    """USD for one hour of use of owned hardware, and how it was reckoned."""
    purchase, years = _number(row, "purchase_usd", where), _number(row, "years", where)
    watts = _number(row, "power_watts", where, zero=True)
    energy = _number(row, "usd_per_kWh", where, zero=True)
    used = _number(row, "utilisation", where)
    assert purchase is not None
    if years is None:
        raise DataError(f"{where}: purchase_usd needs years, over which it is written off.")
    if (watts is None) != (energy is None):
        raise DataError(f"{where}: power_watts and usd_per_kWh go together; one of them is empty.")
    if used is not None and used > 1:
        raise DataError(f"{where}: utilisation is {used:g}: expected a share of the hours, at most 1.")
    used = 1.0 if used is None else used
    hourly = purchase / (years * HOURS_A_YEAR * used)
    said = f"{purchase:g} USD / ({years:g} years x {HOURS_A_YEAR:g} h x {used:g} in use) = {hourly:.4g}"
    if watts is None or energy is None:
        return hourly, f"{said} USD/h, without power"
    power = watts / 1000 * energy
    return hourly + power, (
        f"{said} + {watts / 1000:g} kW x {energy:g} USD/kWh = {power:.4g}: {hourly + power:.4g} USD/h"
    )


def write(prices: Iterable[Price]) -> str:
    """The text of a CSV file that `read` reads back to the same prices (owned ones become hourly rates)."""
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for price in prices:
        cells = [getattr(price, name) for name in COLUMNS]
        rows.writerow("" if cell is None else cell for cell in cells)
    return text.getvalue()


def current(table: Sequence[Price], on: datetime.date | None = None) -> list[Price]:
    """The rows of a table in force on a day, by default that of its newest row.

    Of rows that differ only in date and price, the newest; none after `on`, none more than
    `LOOK_BACK_DAYS` before it.
    """
    if not table:
        return []
    day = max(price.day for price in table) if on is None else on
    since = day - datetime.timedelta(days=LOOK_BACK_DAYS)
    newest: dict[tuple, Price] = {}
    for price in sorted(table, key=lambda price: price.day):
        if since <= price.day <= day:
            key = (price.chip, price.chips, price.cloud, price.instance, price.region, price.includes)
            newest[key] = price
    return list(newest.values())


def prices_for(target: Target, table: Sequence[Price], on: datetime.date | None = None) -> list[Price]:
    """The prices of a target, cheapest first, after them estimates and unknown on-demand prices.

    Prices of exactly its chips where a cloud lists them. Otherwise, per cloud, one reckoned from its nearest
    row, which its `note` says:

    - a TPU slice in proportion to the chips: that is how slices are sold, but for v2 and v3, where more
      than one board costs more a chip, so the row nearest in size counts;
    - GPUs as several separate machines of fewer: an estimate, without the network between them.

    A part of a machine has no price. One TPU core costs what it is rented as. Owned hardware is never
    divided or multiplied. `on` is the day that counts, by default that of the table's newest row.
    """
    if target.rented_as:
        whole = parse(target.rented_as)
        said = f"the price of {whole.name}: {target.name} cannot be rented alone"
        return [_noted(price, said) for price in prices_for(whole, table, on)]
    rows = [price for price in current(table, on) if price.chip == target.chip.name]
    found = []
    for cloud in dict.fromkeys(price.cloud for price in rows):
        listed = [price for price in rows if price.cloud == cloud]
        exact = [price for price in listed if price.chips == target.chips]
        found += exact or _scaled(target, listed)
    return sorted(found, key=lambda price: (price.machines, _or_last(price.usd_per_hour)))


def _scaled(target: Target, listed: Sequence[Price]) -> list[Price]:
    listed = [price for price in listed if not price.includes.startswith("owned")]
    if target.chip.kind == "TPU":
        by_size = sorted(listed, key=lambda price: (abs(math.log(price.chips / target.chips)), price.chips))
        return [
            _times(price, target.chips / price.chips, target.name, f"in proportion from {price.instance}")
            for price in by_size[:1]
        ]
    parts = [price for price in listed if target.chips % price.chips == 0 and target.chip.kind == "GPU"]
    largest = max((price.chips for price in parts), default=1)
    count = target.chips // largest
    return [
        replace(
            _times(price, count, f"{count} x {price.instance}", f"{count} separate machines: an estimate"),
            machines=count,
        )
        for price in parts
        if price.chips == largest
    ]


def _times(price: Price, factor: float, instance: str, said: str) -> Price:
    usd, spot = price.usd_per_hour, price.spot_usd_per_hour
    return replace(
        _noted(price, said),
        chips=round(price.chips * factor),
        instance=instance,
        usd_per_hour=None if usd is None else usd * factor,
        spot_usd_per_hour=None if spot is None else spot * factor,
    )


def _noted(price: Price, said: str) -> Price:
    return replace(price, note="; ".join(part for part in (said, price.note) if part))


def cheapest(prices: Iterable[Price], spot: bool = False) -> Price | None:
    """The lowest on-demand (or spot) price, or `None` when none is known.

    A lower price does not win when it buys less: an accelerator without its host, or more machines
    without the network between them.
    """

    def usd(price: Price) -> float | None:
        return price.spot_usd_per_hour if spot else price.usd_per_hour

    known = [price for price in prices if usd(price) is not None]
    return min(known, key=lambda p: (not p.has_host, p.machines, _or_last(usd(p))), default=None)


def _or_last(usd: float | None) -> float:
    return math.inf if usd is None else usd
