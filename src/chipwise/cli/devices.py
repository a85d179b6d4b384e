"""`chipwise devices`: this machine, its devices, and problems for training."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..base import fact
from ..explain.terminal import console, grid, lines, table
from . import options
from .options import option
from .standard_output import print_json

if TYPE_CHECKING:
    from ..machine.devices_report import DeviceLine, DevicesReport

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@options.taking
def devices(
    json_: bool = options.JSON,
    simulate: int | None = option("Simulate and use N CPU devices.", "N", min=1),
) -> None:
    """Show this machine, its devices and problems. Exit code 4 if training here would fail.

    \b
    chipwise devices
    chipwise devices --json
    chipwise devices --simulate 8
    """
    # Otherwise JAX would reserve most of a GPU's memory, in which a training may run.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options.Here(simulate=simulate).on()
    from ..machine.devices_report import look

    report = look()
    if json_:
        print_json("devices/3", report.to_json())
    else:
        render(report, console(width=None))
    if report.failed:
        raise typer.Exit(4)


def render(report: DevicesReport, to: Console) -> None:
    """Prints the report as tables, with equal devices on one line."""
    versions = [f"{name} {version}" for name, version in report.versions.items() if version]
    for part in (grid(_host(report)), _devices(report), grid([("versions", ", ".join(versions))])):
        to.print(part)
        to.print()
    if not (problems := report.problems):
        lines(to, fact("no-problems"))
    for problem in problems:
        to.print(
            Text.assemble(
                (f"{problem.severity}: ", STYLES[problem.severity]), (problem.what, "bold")
            )
        )
        to.print(grid([("  why", problem.why), ("  fix", problem.fix)]))


def _host(here: DevicesReport) -> list[tuple[str, str]]:
    share = "" if here.cores.usable == here.cores.machine else f" usable of {here.cores.machine}"
    memory = here.memory
    return [
        ("processes", str(here.processes)),
        ("host cores", f"{here.cores.usable:g}{share}"),
        ("host memory", f"{_gib(memory.available_bytes)} available of {_gib(memory.total_bytes)}"),
    ]


def _devices(here: DevicesReport) -> Table:
    cells = []
    groups: dict[tuple, list[DeviceLine]] = {}
    for line in here.devices:
        groups.setdefault((line.platform, line.kind, line.memory_bytes, line.chip), []).append(line)
    for (platform, kind, size, chip), equal in groups.items():
        count = f"{len(equal)}{' simulated' if here.simulated else ''}"
        memory = _gib(size) if size else "shares the host's" if platform == "cpu" else "unknown"
        cells.append((count, platform, kind, memory, chip or "not in it"))
    columns = ("devices", "platform", "kind", "memory each", "catalogue")
    return table(columns, cells or [("none", "", "", "", "")], left=columns, fold=columns)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
