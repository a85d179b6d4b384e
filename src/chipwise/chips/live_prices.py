"""Prices of today: what `--prices live` reads, through gpuhunt.

gpuhunt reads the clouds' own lists every day and publishes a catalogue for each, with the day in
its version. Offers at Vast are asked for at once, and only those of chips in our catalogue. Each
offer is of a whole instance. Of one cloud, the cheapest on demand and the cheapest spot are kept
for each chip and number of chips.

A chip is never guessed. GPUs that are sold in one form alone are joined by the catalogue's own
names, and RunPod's by the device's name. Which form a cloud means by a name of several, such as
A100, is in `cloud_names.csv`, by the name of the instance. The memory must agree too. Other offers
are counted and left out, and so are those on other terms, such as clusters of several machines.
"""

from __future__ import annotations

import datetime
import logging
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import DataError, DeviceError, Fact, fact
from .catalogue import REPORTED, called, rows
from .prices import Price, load
from .targets import parse

LIVE = "live"
CLOUDS = {
    "aws": "aws",
    "azure": "azure",
    "gcp": "gcp",
    "lambdalabs": "lambda",
    "nebius": "nebius",
    "runpod": "runpod",
    "vastai": "vast (marketplace)",
}
"""Our names of gpuhunt's clouds."""
SECONDS = 20  # that a server may be silent
DISK_GB = 100  # rented with a machine at Vast, which has a price for each GB

_MACHINES = ("gcp-a4", "gcp-g4", "lambda-arm")
"""gpuhunt's marks of offers that are still one machine, for as long as it is wanted."""
_NAMES = rows("cloud_names.csv")
_FORMS = {row["gpu"] for row in _NAMES if row["cloud"] != "vastai"}  # sold in several forms


@dataclass(frozen=True)
class PricesRead:
    """Prices, and what to say of how they were read."""

    prices: tuple[Price, ...]
    said: tuple[Fact, ...] = ()


def prices(given: str | Path | None = None) -> PricesRead:
    """The prices of today for `"live"`, otherwise those of `load`. Raises as `live` and `load`
    do."""
    return live() if given == LIVE else PricesRead(load(given))


def live() -> PricesRead:
    """The prices of today. Raises `DataError` without gpuhunt, or if no cloud can be read."""
    try:
        import gpuhunt
    except ImportError:
        raise DataError("prices-live-library") from None
    logging.getLogger("gpuhunt").addHandler(logging.NullHandler())  # what fails is told below
    found: list[Price] = []
    told: list[str] = []
    unknown: Counter[str] = Counter()
    failed: dict[str, str] = {}
    usual = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SECONDS)
    try:
        catalog = gpuhunt.Catalog(auto_reload=False)
        try:
            catalog.load()
        except gpuhunt.GPUHuntError as error:
            failed["all"] = str(error.__cause__ or error)
        for cloud, name in CLOUDS.items():
            try:
                version, offers = _offers(catalog, cloud)
                some = _cheapest(cloud, version, offers, unknown)
            # A field that is null is a TypeError of gpuhunt's
            except (OSError, ValueError, LookupError, TypeError) as error:
                failed[name] = str(error)
                continue
            found += some
            told.append(f"{name} {_day(version)} ({len(some)})")
    finally:
        socket.setdefaulttimeout(usual)
    if not found:
        why = next(iter(failed.values()), "empty lists")
        raise DataError("prices-live-none", why=why, snapshot=max(one.day for one in load()))
    said = [fact("prices-live", prices=len(found), clouds=told)]
    if unknown:
        names = [name for name, _ in unknown.most_common()]
        said.append(fact("prices-live-unknown", offers=unknown.total(), names=names))
    failed.pop("all", None)
    if failed:
        reasons = [f"{name} ({failed[name]})" for name in sorted(failed)]
        said.append(fact("prices-live-failed", clouds=sorted(failed), reasons=reasons))
    return PricesRead(tuple(found), tuple(said))


def _offers(catalog: Any, cloud: str) -> tuple[str, Iterable[tuple[str, Any]]]:
    """A cloud's version, which begins with its day, and its offers with the names of their GPUs.
    Raises `OSError`, `ValueError` or `LookupError` if it cannot be read."""
    if cloud == "vastai":
        return f"{datetime.date.today():%Y%m%d}", list(_vast())
    version = catalog.catalog[cloud].version
    listed = catalog.query(provider=cloud, min_gpu_count=1, allowed_flags=_MACHINES)
    name = "instance_name" if cloud == "runpod" else "gpu_name"
    return version, [(getattr(offer, name) or "", offer) for offer in listed]


def _vast() -> Iterator[tuple[str, Any]]:
    """The cheapest offers of each chip at Vast. gpuhunt gives cards of several forms one name, so
    each of Vast's own names is asked for."""
    from gpuhunt import QueryFilter
    from gpuhunt.providers.vastai import VastAIProvider

    # An unknown name lifts the limit to 3,000
    everything = QueryFilter(gpu_name=["?"], min_disk_size=DISK_GB)

    def ask(name: str) -> list[Any]:
        only: Any = {"gpu_name": {"eq": name}}
        return VastAIProvider(extra_filters=only, order=[("dph_base", "asc")]).get(everything)

    names = list(dict.fromkeys(row["gpu"] for row in _NAMES if row["cloud"] == "vastai"))
    with ThreadPoolExecutor(4) as pool:
        for name, offers in zip(names, pool.map(ask, names), strict=True):
            yield from ((name, offer) for offer in offers)


def _cheapest(
    cloud: str, version: str, offers: Iterable[tuple[str, Any]], unknown: Counter[str]
) -> list[Price]:
    """The cheapest offers of each chip and number. Counts the GPUs of other offers in
    `unknown`."""
    import gpuhunt.version

    best: dict[tuple[str, int], dict[bool, Any]] = {}
    for gpu, offer in offers:
        if offer.provider_data.get("is_preemptible_flat_rate") or not offer.price > 0:
            continue  # the price on demand under another name, or none
        what = _chips(cloud, gpu, offer)
        if what is None:
            unknown[gpu] += 1
            continue
        known = best.setdefault(what, {})
        if offer.spot not in known or offer.price < known[offer.spot].price:
            known[offer.spot] = offer
    made = []
    for (chip, chips), known in best.items():
        usual, spot = known.get(False), known.get(True)
        one: Any = usual or spot
        elsewhere = spot is not None and spot.instance_name != one.instance_name
        made.append(
            Price(
                chip=chip,
                chips=chips,
                cloud=CLOUDS[cloud],
                instance=one.instance_name,
                region=one.location,
                usd_per_hour=usual and usual.price,
                spot_usd_per_hour=spot and spot.price,
                spot_region=spot.location if spot else "",
                includes="slice with its host" if one.gpu_vendor == "google" else "whole VM",
                source=f"gpuhunt {gpuhunt.version.__version__}, {cloud} {version}",
                date=_day(version).isoformat(),
                note="; ".join(
                    [f"with {DISK_GB} GB of disk"] * (cloud == "vastai")
                    + [f"spot: {spot and spot.instance_name}"] * elsewhere
                ),
            )
        )
    return made


def _day(version: str) -> datetime.date:
    return datetime.datetime.strptime(version[:8], "%Y%m%d").date()


def _chips(cloud: str, gpu: str, offer: Any) -> tuple[str, int] | None:
    """The chip and the number of an offer, or `None` if it is unknown which they are."""
    if offer.gpu_vendor == "google":
        try:
            target = parse(gpu)
        except DeviceError:  # a slice larger than plans go
            return None
        return target.chip.name, target.chips
    rows = [row for row in _NAMES if (row["cloud"], row["gpu"]) == (cloud, gpu)]
    here = [row for row in rows if re.fullmatch(row["instance"] or ".*", offer.instance_name)]
    names = [row["chip"] for row in here] if here or gpu in _FORMS else [gpu]
    low, high = REPORTED
    fit = {
        chip.name
        for name in names
        for chip in called(name)
        if chip.memory_GB and low <= (offer.gpu_memory or 0) / chip.memory_GB <= high
    }
    return (fit.pop(), offer.gpu_count) if len(fit) == 1 else None
