"""Writes today's prices of the chips in our catalogue into a price file, from SkyPilot's catalogue of clouds.

    pip install skypilot
    python tools/skypilot_prices.py prices.csv        # then: chipwise plan ... --prices prices.csv

SkyPilot keeps one table a cloud (https://github.com/skypilot-org/skypilot-catalog), one row a machine,
region and zone, and downloads it when its copy is older than asked for. What must not be taken from it as
it stands, found by comparing it with the clouds' own prices:

- an empty price, and a spot price of 0, mean unknown, not free;
- 700 is a placeholder: SkyPilot's own upper bound for a v6e slice whose price it did not find;
- GCP's on-demand column mixes other offers in: in some regions an H100 stands at 4.20 and in others at
  9.80, which is the price. A listing below `OTHER_OFFER` of the highest in the same part of the world is
  left out; real regional differences are smaller;
- a spot price equal to the on-demand one means that there is no spot market there;
- a GCP row of a GPU is the GPU alone, its machine a row of its own; a TPU row is the slice with its host;
- rows repeat, once a zone.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chipwise.base.errors import DeviceError
from chipwise.chips.catalogue import Chip, named
from chipwise.chips.prices import COLUMNS, Price
from chipwise.chips.targets import parse

CLOUDS = ("aws", "azure", "gcp", "lambda", "nebius", "paperspace", "runpod", "shadeform", "vast", "verda")
PLACEHOLDER = 700.0
OTHER_OFFER = 0.75
STALE_HOURS = 24

# The form factor that a cloud means by a name which says none.
_MEANS = {
    ("azure", "V100"): "v100-pcie",
    ("runpod", "A100-80GB"): "a100-pcie",
    ("runpod", "H100"): "h100-pcie",
}


def fetch(clouds: Sequence[str] = CLOUDS, warn: Callable[[str], None] = lambda message: None) -> list[Price]:
    """Today's prices of every chip in our catalogue, dated today.

    A cloud that cannot be read is a `warn`ing. Where SkyPilot cannot download a table but has an older
    copy, it uses that and says so on standard error, where all it prints goes. Raises `ImportError` where
    `skypilot` is not installed, `ValueError` where no cloud could be read.
    """
    tables = _catalogue()
    today = datetime.date.today().isoformat()
    prices: list[Price] = []
    for cloud in clouds:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                rows = tables(f"{cloud}/vms.csv").to_dict("records")
        except Exception as error:  # whatever a download or a damaged file raises there
            why = (str(error).splitlines() or [type(error).__name__])[0][:100]
            warn(f"{cloud}: left out, SkyPilot's table could not be read ({why}).")
            continue
        prices += clean(cloud, rows, today)
    if not prices:
        raise ValueError("SkyPilot listed no price: check the network, then run this again.")
    return prices


def _catalogue() -> Callable[[str], Any]:
    try:
        from sky.catalog import common
    except ImportError:  # before 0.10
        from sky.clouds.service_catalog import common
    return lambda name: common.read_catalog(name, pull_frequency_hours=STALE_HOURS)


def clean(cloud: str, rows: Iterable[Mapping[str, Any]], today: str) -> list[Price]:
    """The prices in one cloud's rows: one a machine, of the region where it is cheapest, without the traps.

    Rows have SkyPilot's columns: `InstanceType`, `AcceleratorName`, `AcceleratorCount`, `Region`, `Price`,
    `SpotPrice`. Rows of chips that are not in our catalogue are left out.
    """
    offers: dict[tuple[str, int, str, str], list[tuple[str, float | None, float | None]]] = {}
    for row in rows:
        what = _what(cloud, row)
        if what is None:
            continue
        usd, spot = _usd(row.get("Price")), _usd(row.get("SpotPrice"))
        if spot == usd:
            spot = None
        if usd is not None or spot is not None:
            offers.setdefault(what, []).append((str(row.get("Region") or ""), usd, spot))
    found = []
    for (chip, chips, instance, includes), listed in offers.items():
        kept = _without_other_offers(listed) if cloud == "gcp" else listed
        usd, region = min(((u, r) for r, u, _ in kept if u is not None), default=(None, ""))
        spot, spot_region = min(((s, r) for r, _, s in listed if s is not None), default=(None, ""))
        left = len({(r, u) for r, u, _ in listed if u is not None} - {(r, u) for r, u, _ in kept})
        found.append(
            Price(
                chip=chip,
                chips=chips,
                cloud=cloud,
                instance=instance,
                region=region,
                usd_per_hour=usd,
                spot_usd_per_hour=spot,
                spot_region=spot_region,
                includes=includes,
                source=f"SkyPilot's catalogue, {cloud}/vms.csv",
                date=today,
                note=f"{left} lower listings left out as another offer" if left else "",
            )
        )
    return sorted(found, key=lambda price: (price.chip, price.chips, price.instance))


def _what(cloud: str, row: Mapping[str, Any]) -> tuple[str, int, str, str] | None:
    """Chip, number of chips, instance and what the price includes; `None` for what is not ours."""
    name, instance = row.get("AcceleratorName"), row.get("InstanceType")
    if not isinstance(name, str):
        return None
    instance = instance if isinstance(instance, str) and instance != "TPU-VM" else ""
    if name.lower().startswith("tpu"):
        try:
            target = parse(name)
        except DeviceError:  # a slice larger than plans go
            return None
        return target.chip.name, target.chips, name.removeprefix("tpu-"), "slice with its host"
    chip, count = _gpu(cloud, name, instance), _number(row.get("AcceleratorCount"))
    if chip is None or count is None or count < 1 or count != int(count):  # also half a GPU
        return None
    if not instance:
        return chip.name, int(count), f"{name} on a machine", "accelerator alone"
    return chip.name, int(count), instance, "accelerator alone" if cloud == "gcp" else "whole VM"


def _gpu(cloud: str, name: str, instance: str) -> Chip | None:
    chip = named(_MEANS.get((cloud, name), name))
    if chip is not None and "pcie" in f"{name} {instance}".lower():
        chip = named(f"{chip.names[0].split('-')[0]}-pcie") or chip
    return chip


def _number(cell: Any) -> float | None:
    try:
        value = float(cell)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _usd(cell: Any) -> float | None:
    value = _number(cell)
    return None if value is None or value <= 0 or value == PLACEHOLDER else value


def _without_other_offers(
    listed: Sequence[tuple[str, float | None, float | None]],
) -> list[tuple[str, float | None, float | None]]:
    """The listings within `OTHER_OFFER` of the highest price in their part of the world, the first word of
    the region: `us` of `us-central1`."""
    highest: dict[str, float] = {}
    for region, usd, _ in listed:
        if usd is not None:
            part = region.split("-")[0]
            highest[part] = max(usd, highest.get(part, 0.0))
    return [
        offer
        for offer in listed
        if offer[1] is not None and offer[1] >= OTHER_OFFER * highest[offer[0].split("-")[0]]
    ]


def write(prices: Iterable[Price], path: Path) -> None:
    """A CSV file that `chipwise.chips.prices.load` reads back to the same prices."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        for price in prices:
            rows.writerow("" if (cell := getattr(price, name)) is None else cell for name in COLUMNS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="where to write")
    file = parser.parse_args(arguments).file
    try:
        prices = fetch(warn=lambda message: print(f"warning: {message}", file=sys.stderr))
        write(prices, file)
    except ImportError:
        sys.exit("SkyPilot's catalogue is not installed here: pip install skypilot")
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    clouds = ", ".join(f"{cloud} {count}" for cloud, count in Counter(p.cloud for p in prices).items())
    print(f"{len(prices)} prices ({clouds}) written to {file}")


if __name__ == "__main__":
    main()
