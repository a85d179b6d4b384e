"""The report of `chipwise devices`: the hardware and software of this host, and problems for
training.

A broken device is reported as a problem and raises no error. A report is a value, so a test can
describe any machine.
"""

from __future__ import annotations

import platform as python_platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np

from .. import chips
from ..base import Fact, fact, text_of
from ..chips import unlisted
from . import guard
from .detect import jax_errors, memory_of, memory_stats
from .host_facts import LISTED, HostFacts, gather, installed
from .hosts import joined
from .jax_settings import setting
from .limits import Cores, HostMemory, cores, memory

SEVERITIES = ("error", "warning", "note")
GiB = 2**30

# Eight TPU v3 cores needed at least 16 logical cores to decode and augment JPEGs on the host. Here,
# devices do the augmentation, so two cores per device are a lower bound that may not suffice.
CORES_PER_DEVICE = 2
LOW_MEMORY_BYTES = 2 * GiB


@dataclass(frozen=True)
class Problem:
    """A problem for training, whose fact has the texts what, why and fix.

    *Fields:* `severity`: `"error"` (training cannot run as requested), `"warning"` (it can, but
    badly) or `"note"` (good to know).
    """

    severity: str
    fact: Fact

    what = text_of()
    why = text_of("why")
    fix = text_of("fix")

    def to_json(self) -> dict[str, Any]:
        texts = {"what": self.what, "why": self.why, "fix": self.fix}
        return {"severity": self.severity, **self.fact.json(), **texts}


@dataclass(frozen=True)
class DeviceLine:
    """A JAX device. `memory_bytes` is the memory that JAX may allocate, by default three quarters
    of a GPU's memory. `None` if unknown."""

    id: int
    platform: str
    kind: str
    process: int = 0
    chip: str | None = None  # its name in the catalogue
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    error: str | None = None  # from an attempt to store one number on it
    row: str | None = None  # of a GPU that the catalogue lacks: the row to add to it


@dataclass(frozen=True)
class DevicesReport:
    """The content of `chipwise devices`: a host, and the JAX devices of this process.

    *Fields:* `processes`: the number of JAX processes. `joined`: the number of those that joined
    with `hosts`. `jax_errors`: JAX's messages by platform, or by "" when JAX did not start.
    """

    facts: HostFacts
    cores: Cores
    memory: HostMemory
    devices: tuple[DeviceLine, ...] = ()
    processes: int = 1
    joined: int = 1
    jax_platforms: str | None = None
    jax_errors: dict[str, str] = field(default_factory=dict)
    float64: bool = False

    @property
    def platform(self) -> str | None:
        return self.devices[0].platform if self.devices else None

    @property
    def simulated(self) -> bool:
        return self.platform == "cpu" and len(self.devices) > 1

    @property
    def versions(self) -> dict[str, str | None]:
        """The versions of software that affects results or speed. `None` means not installed."""
        known = self.facts.packages
        cuda = next((n for n in ("jax-cuda12-plugin", "jax-cuda13-plugin") if n in known), None)
        return {
            "python": python_platform.python_version(),
            **{name: known.get(name) or installed(name) for name in LISTED},
            "cuda plugin": f"{cuda} {known[cuda]}" if cuda else None,
            "nvidia driver": self.facts.nvidia_driver,
        }

    @property
    def problems(self) -> list[Problem]:
        """Errors first."""
        found = [
            Problem(*problem) for part in (_devices, _settings, _host) for problem in part(self)
        ]
        return sorted(found, key=lambda p: SEVERITIES.index(p.severity))

    @property
    def failed(self) -> bool:
        """Whether a problem is of severity `"error"`."""
        return any(p.severity == "error" for p in self.problems)

    def to_json(self) -> dict[str, Any]:
        """Plain values with stable keys that are always present. `null` means unknown. Sizes are in
        bytes."""
        return {
            "platform": self.platform,
            "device_count": len(self.devices),
            "simulated": self.simulated,
            "processes": self.processes,
            "devices": [asdict(d) for d in self.devices],
            "host": {
                "cores": self.cores.machine,
                "cores_usable": self.cores.usable,
                "memory_bytes": self.memory.total_bytes,
                "memory_available_bytes": self.memory.available_bytes,
            },
            "versions": self.versions,
            "problems": [p.to_json() for p in self.problems],
            "ok": not self.failed,
        }


def look(facts: HostFacts | None = None) -> DevicesReport:
    """The report of this host and of JAX's devices. Starts JAX.

    *Arguments:* `facts`: by default this host's.
    """
    facts = gather() if facts is None else facts
    errors: dict[str, str] = {}
    devices = []
    processes = 1
    try:
        devices = jax.local_devices()
        processes = jax.process_count()
    except Exception as error:  # a broken plugin may raise anything; it is reported as a problem
        errors[""] = str(error)
    if devices and devices[0].platform == "cpu":
        errors = jax_errors([a.platform for a in guard.unused(facts, setting("jax_platforms"))])
    return DevicesReport(
        facts=facts,
        cores=cores(),
        memory=memory(),
        devices=tuple(map(_line, devices)),
        processes=processes,
        joined=1 if (run := joined()) is None else run.count,
        jax_platforms=setting("jax_platforms"),
        jax_errors=errors,
        float64=bool(setting("jax_enable_x64")),
    )


def _line(device: jax.Device) -> DeviceLine:
    error = None
    try:
        jax.device_put(np.zeros(1, np.float32), device).block_until_ready()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    stats = memory_stats(device)
    memory = memory_of(device)
    chip = chips.find(device.device_kind, memory)
    return DeviceLine(
        id=device.id,
        platform=device.platform,
        kind=device.device_kind,
        process=device.process_index,
        chip=chip.name if chip else None,
        memory_bytes=stats.get("bytes_limit"),
        memory_used_bytes=stats.get("bytes_in_use"),
        error=error,
        row=None if chip or device.platform != "gpu" else _row(device, memory),
    )


def _row(device: jax.Device, memory: float | None) -> str | None:
    capability = getattr(device, "compute_capability", "")
    return unlisted.row(device.device_kind, getattr(device, "core_count", None), capability, memory)


def _devices(s: DevicesReport) -> Iterator[tuple[str, Fact]]:
    unused = guard.unused(s.facts, s.jax_platforms)
    if s.platform is None:
        message = " ".join(next(iter(s.jax_errors.values()), "").split())[:600]
        if unused:
            yield (
                "error",
                fact("no-devices", reason=guard.why_unused(s.facts, unused[0].platform, message)),
            )
        else:
            yield "error", fact("no-backend", said=message)
    elif s.platform == "cpu":
        for name in [accelerator.platform for accelerator in unused]:
            yield (
                "error",
                fact(
                    "fell-back-to-cpu",
                    platform=name.upper(),
                    reason=guard.why_unused(s.facts, name, s.jax_errors.get(name, "")),
                ),
            )
    for device in s.devices:
        if device.error:
            yield (
                "error",
                fact("device-broken", device=device.id, said=" ".join(device.error.split())[:400]),
            )
    for row, kind in {device.row: device.kind for device in s.devices if device.row}.items():
        yield "note", fact("chip-unlisted", kind=kind, row=row)
    old = guard.driver_too_old(s.facts)
    if old and s.platform == "gpu":
        yield "warning", fact("driver-old", reason=old)


def _settings(s: DevicesReport) -> Iterator[tuple[str, Fact]]:
    purpose = guard.cpu_on_purpose(s.facts, s.jax_platforms)
    hidden = guard.hidden(s.facts)
    present = [a.platform.upper() for a in guard.accelerators(s.facts)]
    if purpose and present:
        yield "warning", fact("accelerator-left-alone", accelerators=present, setting=purpose)
    elif hidden and "GPU" in present and s.platform == "cpu":
        yield "warning", fact("gpu-hidden", setting=hidden)
    if s.float64:
        yield "warning", fact("float64-enabled")
    if s.processes > s.joined:
        yield "error", fact("processes-apart", processes=s.processes)


def _host(s: DevicesReport) -> Iterator[tuple[str, Fact]]:
    devices = len(s.devices)
    usable = int(s.cores.usable) if s.cores.usable.is_integer() else s.cores.usable
    least = CORES_PER_DEVICE * devices
    if s.platform in ("gpu", "tpu") and usable < least:
        yield "warning", fact("few-host-cores", cores=usable, devices=devices, least=least)
    if s.platform == "cpu" and devices > usable:
        yield "note", fact("devices-take-turns", cores=usable, devices=devices)
    if s.memory.available_bytes < LOW_MEMORY_BYTES:
        yield "warning", fact("memory-low", gib=s.memory.available_bytes / GiB)
