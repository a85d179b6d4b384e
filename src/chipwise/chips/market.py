"""The clouds and regions whose prices count."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import DataError, near
from .prices import Price


@dataclass(frozen=True)
class Market:
    """The clouds and regions to rent from; by default all.

    *Fields:* `clouds`: names such as "gcp"; `regions`: names or prefixes, such as "us-" or "europe-west4";
    `marketplaces`: whether the lowest offers of marketplaces count.
    """

    clouds: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    marketplaces: bool = True

    def select(self, table: Sequence[Price]) -> tuple[Price, ...]:
        """The prices of `table` in these clouds and regions, and of owned hardware. If only the on-demand or
        only the spot price of a row is in a region, the other is removed.

        Raises `DataError` for a cloud or a region that is not in the table.
        """
        clouds = sorted({name for price in table for name in _cloud_names(price)})
        for cloud in self.clouds:
            if cloud.lower() not in clouds:
                text = "{cloud:plain}: no prices of this cloud.{hint:near} Clouds: {clouds:list}."
                raise DataError(
                    "price-cloud-unknown", text, cloud=cloud, hint=near(cloud, clouds), clouds=clouds
                )
        listed = sorted({place for price in table for place in (price.region, price.spot_region) if place})
        for region in self.regions:
            if not any(place.lower().startswith(region.lower()) for place in listed):
                text = "{region:plain}: no prices of this region.{hint:near}"
                raise DataError("price-region-unknown", text, region=region, hint=near(region, listed))
        asked = {cloud.lower() for cloud in self.clouds}
        kept = []
        for price in table:
            if price.owned:
                kept.append(price)
            elif (not asked or asked & _cloud_names(price)) and (self.marketplaces or not price.market):
                usd = price.usd_per_hour if _within(price.region, self.regions) else None
                spot_region = price.spot_region or price.region
                spot = price.spot_usd_per_hour if _within(spot_region, self.regions) else None
                if usd is not None or spot is not None:
                    kept.append(replace(price, usd_per_hour=usd, spot_usd_per_hour=spot))
        return tuple(kept)


def _cloud_names(price: Price) -> set[str]:
    """The names of its cloud: for "lambda (via shadeform)" both."""
    return set(re.findall(r"[a-z0-9]+", price.cloud.lower())) - {"via", "marketplace"}


def _within(place: str, regions: Sequence[str]) -> bool:
    """Whether a row's region is one of `regions`; "all" is everywhere."""
    lowered = place.lower()
    return not regions or lowered == "all" or any(lowered.startswith(region.lower()) for region in regions)
