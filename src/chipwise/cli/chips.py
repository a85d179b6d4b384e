"""`chipwise chips [NAME]`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..chips.catalogue import CHIPS, Chip, named
from ..chips.prices import Price, current, load, prices_for
from ..chips.targets import SLICES, Target, parse
from ..errors import DeviceError, nearest
from . import options

SCHEMA = 1
"""Grows when a key of the JSON changes its meaning or goes; new keys do not change it."""

PriceFile = Annotated[
    str | None, typer.Option("--prices", metavar="FILE", help="Your own prices instead of the bundled ones.")
]
# What each figure of a row counts: its unit, and of what.
FIGURES = {
    "bf16_dense_tflops": ("TFLOP/s", "bfloat16 products, dense"),
    "fp16_dense_tflops": ("TFLOP/s", "float16 products added in float32, dense"),
    "fp32_tflops": ("TFLOP/s", "float32, without tensor cores"),
    "tf32_dense_tflops": ("TFLOP/s", "TF32 products, dense"),
    "int8_dense_tops": ("TOP/s", "int8 products, dense"),
    "memory_GB": ("GB", "memory"),
    "memory_GBps": ("GB/s", "memory, bytes read or written"),
    "interconnect_GBps_both_ways": ("GB/s", "interconnect, both directions added"),
    "clock_GHz": ("GHz", "clock of a TensorCore"),
    "tensorcores": ("", "TensorCores"),
    "streaming_multiprocessors": ("", "streaming multiprocessors"),
    "jax_devices_per_chip": ("", "JAX devices"),
}


def chips(
    name: Annotated[
        str | None, typer.Argument(help="A chip such as h100 or v5e, or a target such as v3-8 or a100:8.")
    ] = None,
    prices: PriceFile = None,
    json_: options.Json = False,
) -> None:
    """Show the catalogue of chips, or every figure of one with its unit, source and prices.

    \b
    chipwise chips
    chipwise chips v5e
    chipwise chips v3-8
    chipwise chips h100:8 --prices mine.csv --json
    """
    table = load(prices)
    console = wide_console()
    if name is None:
        if json_:
            print(json.dumps({"schema": SCHEMA, "chips": [asdict(chip) for chip in CHIPS]}))
        else:
            console.print(_all())
            console.print("Per chip, dense; - is unknown. `chipwise chips NAME` says where each was read.")
        return
    chip, target = _which(name)
    if target is None:
        listed = sorted((p for p in current(table) if p.chip == chip.name), key=lambda p: p.chips)
        past = [p for p in table if p.chip == chip.name and p not in listed]
    else:
        listed, past = prices_for(target, table), []
    if json_:
        print(json.dumps(_json(chip, target, listed, past)))
        return
    console.print(f"{target.name}: {_told(target)}" if target else f"{chip.name}, {chip.vendor}, {chip.year}")
    console.print(_one(chip))
    for title, text in (("notes", chip.notes), ("checked", chip.verified), ("source", chip.source)):
        console.print(f"{title}: {text}", soft_wrap=True, markup=False)
    if chip.kind == "TPU":
        console.print(f"slices: {', '.join(f'{chip.names[0]}-{size}' for size in SLICES[chip.names[0]])}")
    for heading, some in (("prices", listed), ("no longer in force", past)):
        if some:
            console.print(f"\n{heading}:")
            show_prices(console, some)
    if not listed:
        console.print("\nno price is known: `--prices FILE` takes your own")


def _which(name: str) -> tuple[Chip, Target | None]:
    chip = named(name)
    if chip is not None:
        return chip, None
    try:
        target = parse(name)
    except DeviceError as error:
        if "no such target" not in str(error):
            raise
        known = [short for chip in CHIPS for short in chip.names]
        raise DeviceError(
            f"{name}: no such chip.{nearest(name, known)} `chipwise chips` lists them."
        ) from None
    return target.chip, target


def _told(target: Target) -> str:
    counts = [
        f"{target.chips} x {target.chip.name}",
        f"{target.devices} JAX device{'s' * (target.devices > 1)}",
        f"{target.hosts} host{'s' * (target.hosts > 1)}",
    ]
    if target.topology:
        counts.append(f"topology {target.topology}")
    return ", ".join(counts) + (f" ({target.note})" if target.note else "")


def _figure(value: float | int | None) -> str:
    return "-" if value is None else f"{value:g}"


def _all() -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, column in (("name", "left"), ("chip", "left"), ("year", "right"), ("bf16 TFLOP/s", "right"),
                          ("fp32 TFLOP/s", "right"), ("GB", "right"), ("GB/s", "right"),
                          ("links GB/s", "right"), ("JAX devices", "right")):  # fmt: skip
        table.add_column(title, justify="right" if column == "right" else "left")
    for chip in CHIPS:
        figures = (chip.year, chip.bf16_dense_tflops, chip.fp32_tflops, chip.memory_GB, chip.memory_GBps,
                   chip.interconnect_GBps_both_ways, chip.jax_devices_per_chip)  # fmt: skip
        table.add_row(chip.names[0], chip.name, *map(_figure, figures))
    return table


def _one(chip: Chip) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right")
    table.add_column()
    table.add_column()
    for field, (unit, what) in FIGURES.items():
        value = getattr(chip, field)
        if value is not None:
            table.add_row(_figure(value), unit, f"{what}, per {chip.scope}")
    if chip.interconnect_kind:
        table.add_row("", "", f"links: {chip.interconnect_kind}")
    table.add_row("", "", f"JAX calls it: {', '.join(chip.device_kinds)}")
    return table


def show_prices(console: Console, listed: list[Price], notes: bool = True) -> None:
    """Prints prices as lines, each with its date, then their sources by number, then their notes."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("chip", no_wrap=True)
    for title in ("chips", "USD/h", "spot USD/h"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("cloud", "instance", "region", "includes", "date", "source"):
        table.add_column(title, overflow="fold")
    sources = list(dict.fromkeys(price.source for price in listed))
    for price in listed:
        table.add_row(
            price.chip,
            str(price.chips),
            _usd(price.usd_per_hour),
            _usd(price.spot_usd_per_hour),
            price.cloud,
            price.instance,
            price.region,
            price.includes,
            price.day.isoformat(),
            str(sources.index(price.source) + 1),
        )
    console.print(table)
    for number, source in enumerate(sources, 1):
        console.print(f"source {number}: {source}", soft_wrap=True, markup=False)
    for price in listed if notes else ():
        dated = "" if price.date == price.day.isoformat() else f"dated {price.date}"
        if said := "; ".join(part for part in (price.note, dated) if part):
            console.print(f"{price.instance or price.cloud}: {said}", soft_wrap=True, markup=False)


def wide_console() -> Console:
    """Standard output; when it is no terminal, wide enough for a table of prices."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 170)


def _usd(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value >= 1 else f"{value:.4f}"


def _json(chip: Chip, target: Target | None, listed: list[Price], past: list[Price]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "chip": asdict(chip),
        "units": {field: f"{unit} per {chip.scope}".strip() for field, (unit, _) in FIGURES.items()},
        "target": None
        if target is None
        else {
            "name": target.name,
            "chips": target.chips,
            "devices": target.devices,
            "hosts": target.hosts,
            "topology": target.topology,
            "topology_arguments": target.topology_arguments(),
            "rented_as": target.rented_as or target.name,
            "note": target.note and target.note.json(),
        },
        "prices": [asdict(price) for price in listed],
        "past_prices": [asdict(price) for price in past],
    }
