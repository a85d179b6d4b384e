"""What a row costs, at dated prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...chips.prices import Price, cheapest, prices_for
from ...planner.plans import Range
from .row import Row
from .sources import target_of
from .speed import Figure
from .target import TimeTo


@dataclass(frozen=True)
class Money:
    """Dollars of a row at one price. Each is with its interval where the time has one, `None` where the time
    is not known."""

    spot: bool
    usd_per_hour: float
    per_million_examples: Range | None
    run: Range | None
    target: Range | None  # to the named accuracy
    target_basis: str  # "wall time", as `run`, or "training alone" where no more is known; "" without target
    cloud: str
    instance: str
    region: str
    includes: str
    date: str
    source: str
    note: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def costs(
    row: Row, table: Sequence[Price], speed: Figure | None, wall: Figure | None, target: TimeTo | None
) -> tuple[list[Money], str]:
    """The cheapest on-demand and spot price of the row's chips, a published row's own price first; and why
    there is none."""
    found = []
    own = row.published
    if own is not None and own.usd_per_hour is not None:
        price = Price(
            chip=own.device, chips=1, cloud="", instance=own.device, region="", usd_per_hour=own.usd_per_hour,
            spot_usd_per_hour=None, spot_region="", includes=own.price_note, source=own.source, date=own.date,
            note="the price that the source states, of its time",
        )  # fmt: skip
        found.append(_money(price, False, speed, wall, target))
        return found, ""
    on = target_of(row)
    if on is None or on.chip.kind == "CPU":
        if on is not None or (row.device or "").lower().startswith("cpu"):
            return [], "no price: the CPU of a host, which is not rented by the chip"
        return [], f"no price: {row.where} is not in the price table"
    prices = prices_for(on, table)
    for spot in (False, True):
        price_now = cheapest(prices, spot)
        if price_now is not None:
            found.append(_money(price_now, spot, speed, wall, target))
    return found, "" if found else f"no price of {on.name} in the table"


def _money(
    price: Price, spot: bool, speed: Figure | None, wall: Figure | None, target: TimeTo | None
) -> Money:
    hourly = price.spot_usd_per_hour if spot else price.usd_per_hour
    assert hourly is not None
    paid = target.paid if target is not None else None
    million = None
    if speed is not None:
        million = _range(speed).inverse(1e6 * hourly / 3600)
    return Money(
        spot=spot,
        usd_per_hour=hourly,
        per_million_examples=million,
        run=None if wall is None else _range(wall).times(hourly / 3600),
        target=None if paid is None else _range(paid).times(hourly / 3600),
        target_basis="" if target is None or paid is None else target.basis,
        cloud=price.cloud,
        instance=price.instance,
        region=price.spot_region if spot else price.region,
        includes=price.includes,
        date=price.date,
        source=price.source,
        note=price.note,
    )


def _range(figure: Figure) -> Range:
    return Range(figure.value, *figure.ends)
