"""`chipwise chips [NAME]`: the catalogue and prices."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from ..base import DeviceError, Fact, fact, near, plain
from ..base.files import replace_file
from ..chips.catalogue import CHIPS, NAMES, Chip, named, rows as rows_of
from ..chips.prices import Price, prices_for, text
from ..chips.targets import SLICES, Target, parse
from ..explain.terminal import console, lines, table
from . import options
from .options import argument, option
from .standard_output import print_json

WIDE = 170
"""The width of a table of prices if standard output is not a terminal."""

FIGURES = {row["figure"]: (row["unit"], row["what"]) for row in rows_of("figure_units.csv")}
"""The unit and the description of each figure."""


@options.taking
def chips(
    name: str | None = argument(
        "A chip such as h100 or v5e, or a target such as v3-8.", default=None
    ),
    prices: str | None = options.PRICES,
    out: Path | None = option("Write these prices as a file for --prices.", "FILE.csv"),
    json_: bool = options.JSON,
) -> None:
    """Show the catalogue of chips, or the figures and prices of one, with their sources.

    \b
    chipwise chips
    chipwise chips v5e
    chipwise chips v3-8
    chipwise chips h100:8 --prices mine.csv --json
    chipwise chips rtx-4090 --prices live --out prices-2026-11-30.csv
    """
    asked = None if name is None else _find(name)
    rows = options.priced(prices)
    if out is not None:
        options.say(fact("written", path=replace_file(out, text(rows), "prices-unwritable")))
    to = console(width=WIDE)
    if asked is None:
        if json_:
            print_json("chips/2", {"chips": [asdict(chip) for chip in CHIPS]})
        else:
            to.print(_all())
            lines(to, fact("chips-legend"))
        return
    chip, target = asked
    if target is None:
        listed = sorted((p for p in rows if p.chip == chip.name), key=lambda p: p.chips)
    else:
        listed = prices_for(target, rows)
    if json_:
        print_json("chip/2", _json(chip, target, listed))
        return
    lines(to, *_titles(chip, target))
    to.print(_one(chip))
    about = {"chip-notes": chip.notes, "chip-checked": chip.verified, "chip-source": chip.source}
    lines(to, *(fact(code, text=text) for code, text in about.items()))
    if chip.kind == "TPU":
        lines(
            to,
            fact(
                "chip-slices", sizes=[f"{chip.names[0]}-{size}" for size in SLICES[chip.names[0]]]
            ),
        )
    lines(to, "", fact("prices-in-force" if listed else "prices-none"))
    if listed:
        to.print(_prices(listed))


def _find(name: str) -> tuple[Chip, Target | None]:
    chip = named(name)
    if chip is not None:
        return chip, None
    try:
        target = parse(name)
    except DeviceError as error:
        if error.code != "target-unknown":
            raise
        text = "{name}: no such chip.{hint:near} `chipwise chips` lists them."
        raise DeviceError("chip-unknown", text, name=name, hint=near(name, NAMES)) from None
    return target.chip, target


def _titles(chip: Chip, target: Target | None) -> list[Fact]:
    if target is None:
        return [fact("chip-title", chip=chip.name, vendor=chip.vendor, year=chip.year)]
    code = "target-title-topology" if target.topology else "target-title"
    title = fact(
        code,
        target=target.name,
        chip=chip.name,
        topology=target.topology,
        chips=target.chips,
        devices=target.devices,
        hosts=target.hosts,
    )
    return [title] if target.note is None else [title, target.note]


def _figure(value: float | int | None) -> str:
    return "-" if value is None else f"{value:g}"


def _all() -> Table:
    shown = {
        "year": "year",
        "bf16 TFLOP/s": "bf16_dense_tflops",
        "fp32 TFLOP/s": "fp32_tflops",
        "GB": "memory_GB",
        "GB/s": "memory_GBps",
        "links GB/s": "interconnect_GBps_both_ways",
        "JAX devices": "jax_devices_per_chip",
    }
    cells = [
        [c.names[0], c.name, *(_figure(getattr(c, field)) for field in shown.values())]
        for c in CHIPS
    ]
    columns = ("name", "chip", *shown)
    return table(columns, cells, left=columns[:2], fold=columns)


def _one(chip: Chip) -> Table:
    values = {field: getattr(chip, field) for field in FIGURES}
    cells = [
        (_figure(values[field]), unit, f"{what}, per {chip.scope}")
        for field, (unit, what) in FIGURES.items()
        if values[field] is not None
    ]
    if chip.interconnect_kind:
        cells.append(("", "", f"links: {chip.interconnect_kind}"))
    cells.append(("", "", f"JAX calls it: {', '.join(chip.device_kinds)}"))
    return table(
        ("figure", "unit", "what"), cells, left=("unit", "what"), fold=("what",), show_header=False
    )


def _prices(listed: list[Price]) -> Table:
    """The prices with their dates, sources and notes."""
    numbers = ("chips", "USD/h of all", "spot USD/h of all")
    words = ("cloud", "instance", "region", "includes", "date", "source and notes")
    cells = [
        (
            p.chip,
            p.chips,
            _usd(p.usd_per_hour),
            _usd(p.spot_usd_per_hour),
            p.cloud,
            p.instance,
            p.region,
            p.includes,
            p.date,
            "; ".join(text for text in (p.source, *map(str, p.reckoned), p.note) if text),
        )
        for p in listed
    ]
    return table(("chip", *numbers, *words), cells, left=("chip", *words), fold=words)


def _usd(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value >= 1 else f"{value:.4f}"


def _json(chip: Chip, target: Target | None, listed: list[Price]) -> dict[str, Any]:
    return {
        "chip": asdict(chip),
        "units": {
            field: f"{unit} per {chip.scope}".strip() for field, (unit, _) in FIGURES.items()
        },
        "target": target
        and {
            **{
                name: getattr(target, name)
                for name in ("name", "chips", "devices", "hosts", "topology")
            },
            "topology_arguments": target.topology_arguments(),
            "rented_as": target.rented_as or target.name,
            "note": target.note and target.note.json(),
        },
        "prices": plain(listed),
    }
