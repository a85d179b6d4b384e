"""The report of `chipwise devices`: what is here, and what is wrong with it.

Nothing here raises because a device is broken; it becomes a problem of the report.
"""

from __future__ import annotations

import platform as python_platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import chips
from . import guard
from .detect import jax_errors
from .facts import HostFacts, gather, installed
from .hosts import Place, place
from .limits import Cores, Disk, Memory, cores, disk, memory
from .problems import GiB, Problem, Situation, problems
from .simulate import setting

SCHEMA = 1
"""Grows when a key of `Report.to_json` changes its meaning or goes; new keys do not change it."""

LISTED = ("chipwise", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclass(frozen=True)
class DeviceLine:
    """One JAX device of this process. `memory_bytes` is what JAX may allocate there, by default three
    quarters of a GPU's own; `None` where the backend does not say."""

    id: int
    platform: str
    kind: str
    process: int
    chip: str | None  # its name in the catalogue
    memory_bytes: int | None
    memory_used_bytes: int | None
    error: str | None  # what it said when asked to hold one number


@dataclass(frozen=True)
class Report:
    """All that `chipwise devices` shows. `devices` are this process's; `processes` counts all."""

    place: Place
    devices: tuple[DeviceLine, ...]
    simulated: bool
    processes: int
    cores: Cores
    memory: Memory
    disk: Disk
    versions: dict[str, str | None]  # `None`: not installed
    problems: tuple[Problem, ...]

    @property
    def failed(self) -> bool:
        """Whether a problem is of severity `"error"`."""
        return any(p.severity == "error" for p in self.problems)

    def to_json(self) -> dict[str, Any]:
        """Plain values with stable keys, all present always, `null` for unknown. Sizes are bytes."""
        return {
            "schema": SCHEMA,
            "where": {
                "name": self.place.name,
                "title": self.place.title,
                "all": list(self.place.all),
                "hosts": self.place.hosts,
            },
            "platform": self.devices[0].platform if self.devices else None,
            "device_count": len(self.devices),
            "simulated": self.simulated,
            "processes": self.processes,
            "devices": [asdict(d) for d in self.devices],
            "host": {
                "cores": self.cores.machine,
                "cores_usable": self.cores.usable,
                "memory_bytes": self.memory.total_bytes,
                "memory_available_bytes": self.memory.available_bytes,
                "disk_path": self.disk.path,
                "disk_bytes": self.disk.total_bytes,
                "disk_free_bytes": self.disk.free_bytes,
            },
            "versions": dict(self.versions),
            "problems": [asdict(p) for p in self.problems],
            "ok": not self.failed,
        }

    def render(self, console: Console) -> None:
        """Prints the report as tables, equal devices on one line."""
        console.print(grid([("where", _where(self)), *_host_rows(self)]))
        console.print()
        console.print(_device_table(self))
        console.print()
        known = [f"{name} {version}" for name, version in self.versions.items() if version]
        console.print(grid([("versions", ", ".join(known))]))
        console.print()
        if not self.problems:
            console.print("No problems found.", style="green")
        for problem in self.problems:
            style = {"error": "bold red", "warning": "yellow", "note": "cyan"}[problem.severity]
            console.print(Text.assemble((f"{problem.severity}: ", style), (problem.what, "bold")))
            console.print(grid([("  why", problem.why), ("  fix", problem.fix)]))


def look(path: str | Path = ".", facts: HostFacts | None = None) -> Report:
    """Looks at this host and at JAX's devices, starting JAX if it has not started.

    `path` is where a run would be written; its disk is the one reported. `facts` defaults to this host's.
    """
    facts = gather() if facts is None else facts
    errors: dict[str, str] = {}
    try:
        found = jax.local_devices()
        processes = jax.process_count()
    except Exception as error:  # a broken plugin may raise anything; the report is the place to say so
        found, processes, errors = [], 1, {"": str(error)}
    lines = tuple(_line(d) for d in found)
    first = lines[0].platform if lines else None
    if first == "cpu":
        missing = [a.platform for a in guard.unused(facts, setting("jax_platforms"))]
        errors = jax_errors(missing)
    here, host_cores, host_memory, host_disk = place(facts), cores(), memory(), disk(path)
    situation = Situation(
        facts=facts,
        place=here,
        cores=host_cores,
        memory=host_memory,
        disk=host_disk,
        platform=first,
        kinds=tuple(d.kind for d in lines),
        processes=processes,
        jax_platforms=setting("jax_platforms"),
        jax_errors=errors,
        broken={d.id: d.error for d in lines if d.error},
        float64=bool(setting("jax_enable_x64")),
    )
    simulated = first == "cpu" and len(lines) > 1
    return Report(
        here,
        lines,
        simulated,
        processes,
        host_cores,
        host_memory,
        host_disk,
        versions(facts),
        tuple(problems(situation)),
    )


def versions(facts: HostFacts) -> dict[str, str | None]:
    """Versions of all that decides results and speed; `None` for what is not installed."""
    cuda = next((n for n in ("jax-cuda12-plugin", "jax-cuda13-plugin") if n in facts.packages), None)
    return {
        "python": python_platform.python_version(),
        **{name: facts.packages.get(name) or installed(name) for name in LISTED},
        "cuda plugin": f"{cuda} {facts.packages[cuda]}" if cuda else None,
        "nvidia driver": facts.nvidia_driver,
    }


def _line(device: jax.Device) -> DeviceLine:
    error = None
    try:
        jax.device_put(np.zeros(1, np.float32), device).block_until_ready()
    except Exception as said:
        error = f"{type(said).__name__}: {said}"
    try:
        stats = device.memory_stats()
    except Exception:  # a backend may not offer it, and works all the same
        stats = None
    chip = chips.find(device.device_kind)
    return DeviceLine(
        id=device.id,
        platform=device.platform,
        kind=device.device_kind,
        process=device.process_index,
        chip=chip.name if chip else None,
        memory_bytes=(stats or {}).get("bytes_limit"),
        memory_used_bytes=(stats or {}).get("bytes_in_use"),
        error=error,
    )


def _where(report: Report) -> str:
    also = [name for name in report.place.all if name != report.place.name]
    return report.place.title + (f" (also {', '.join(also)})" if also else "")


def _host_rows(report: Report) -> list[tuple[str, str]]:
    host = report.cores
    share = "" if host.usable == host.machine else f" usable of {host.machine}"
    return [
        ("processes", str(report.processes)),
        ("host cores", f"{host.usable:g}{share}"),
        (
            "host memory",
            f"{_gib(report.memory.available_bytes)} available of {_gib(report.memory.total_bytes)}",
        ),
        (
            "disk",
            f"{_gib(report.disk.free_bytes)} free of {_gib(report.disk.total_bytes)} at {report.disk.path}",
        ),
    ]


def _device_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("devices", "platform", "kind", "memory each", "catalogue"):
        table.add_column(title, overflow="fold")
    groups: dict[tuple, list[DeviceLine]] = {}
    for line in report.devices:
        groups.setdefault((line.platform, line.kind, line.memory_bytes, line.chip), []).append(line)
    for (platform, kind, size, chip), lines in groups.items():
        count = f"{len(lines)}{' simulated' if report.simulated else ''}"
        size_text = _gib(size) if size else "shares the host's" if platform == "cpu" else "unknown"
        table.add_row(count, platform, Text(kind), size_text, chip or "not in it")
    if not report.devices:
        table.add_row("none", "", "", "", "")
    return table


def grid(rows: list[tuple[str, str]]) -> Table:
    """Names and what they are, in two columns."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        # Text, because a message with [brackets] is not markup
        table.add_row(name, Text(value))
    return table


def _gib(size: int) -> str:
    return f"{size / GiB:.1f} GiB"
