"""The cores and the memory that this process may use.

In a container or a job, the machine's numbers are too large: `os.cpu_count()` may be 96 where two
cores are granted. So this reads the affinity mask and all control groups from the process's own to
the root, of versions 1 and 2. Sizes are bytes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from .plugins import text_in


@dataclass(frozen=True)
class Cores:
    """Logical cores: those of the machine, and those usable by this process, which a quota can make
    a fraction."""

    machine: int
    usable: float


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory that this process may use, and of these the free ones."""

    total_bytes: int
    available_bytes: int


def cores(root: str | Path = "/") -> Cores:
    """Cores, by affinity mask and control groups below `root`."""
    machine = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    return Cores(machine, min([float(affinity), *_cpu_quotas(Path(root))]))


def usable_cores() -> int:
    """The number of whole cores that this process may use, at least 1: a sensible number of
    threads."""
    return max(1, int(cores().usable))


def peak_bytes() -> int | None:
    """The peak host memory of this process in bytes. `None` if the system does not state it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory(root: str | Path = "/") -> HostMemory:
    """Memory, by the host and the control groups below `root`."""
    host = psutil.virtual_memory()
    total = host.total
    available = host.available
    for limit, used in _memory_limits(Path(root)):
        if limit < host.total:  # without a limit, version 1 has 2^63 minus a page
            total = min(total, limit)
            available = min(available, max(0, limit - used))
    return HostMemory(total, available)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of the process's control groups for `controller`, innermost first.

    In a container, `/proc/self/cgroup` may have a path that is not mounted. The mount's top
    directory, which is then the container's group, is always included.
    """
    mount = root / "sys/fs/cgroup"
    tops = {mount: "/", mount / controller: "/"}
    for line in text_in(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names == "":
            tops[mount] = path
        elif controller in names.split(","):
            tops[mount / names if (mount / names).exists() else mount / controller] = path
    for top, path in tops.items():
        # "/../.." is outside of the mount
        inner = top if ".." in path else top / path.lstrip("/")
        yield from (d for d in (inner, *inner.parents) if d == top or top in d.parents)


def _cpu_quotas(root: Path) -> Iterator[float]:
    for directory in _groups(root, "cpu"):
        fields = text_in(directory / "cpu.max").split()
        if len(fields) != 2:
            fields = [
                text_in(directory / "cpu.cfs_quota_us"),
                text_in(directory / "cpu.cfs_period_us"),
            ]
        quota, period = fields
        if quota.isdigit() and period.isdigit() and int(period) > 0:  # "max" and -1 mean no quota
            yield int(quota) / int(period)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """The limit and the use of each control group, in bytes."""
    for directory in _groups(root, "memory"):
        for limit_file, used_file, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = text_in(directory / limit_file)
            if not limit.isdigit():
                continue
            used = text_in(directory / used_file)
            # The group's use includes cached files, which the kernel drops on demand.
            stat = dict(
                line.split()
                for line in text_in(directory / "memory.stat").splitlines()
                if " " in line
            )
            droppable = int(stat.get(cache, 0))
            yield int(limit), max(0, int(used) - droppable) if used.isdigit() else 0
