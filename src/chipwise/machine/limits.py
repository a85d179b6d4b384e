"""What this process may really use of its host: cores, memory and disk.

In a container or a scheduler's job the machine's own numbers are wrong: `os.cpu_count()` may say 96 where
two are granted. Read here are the affinity mask and every control group from the process's own up to the
root, of version 2 and of version 1. Sizes are bytes.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Cores:
    """Host cores (logical): in the machine, and usable by this process, a fraction when a quota says so."""

    machine: int
    usable: float


@dataclass(frozen=True)
class Memory:
    """Host memory in bytes that this process may use in all, and of that what is free now."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Disk:
    """The file system under a path, in bytes."""

    path: str
    total_bytes: int
    free_bytes: int


def cores(root: str | Path = "/") -> Cores:
    """Cores, by affinity mask and control groups below `root`."""
    machine = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    return Cores(machine, min([float(affinity), *_cpu_quotas(Path(root))]))


def usable_cores() -> int:
    """Whole cores that this process may use, at least 1: how many threads are worth having."""
    return max(1, int(cores().usable))


def memory(root: str | Path = "/") -> Memory:
    """Memory, by the host and the control groups below `root`."""
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for limit, used in _memory_limits(Path(root)):
        if limit < host.total:  # an unlimited group of version 1 reads as 2^63 less a page
            total = min(total, limit)
            available = min(available, max(0, limit - used))
    return Memory(total, available)


def disk(path: str | Path = ".") -> Disk:
    """The file system that holds `path`, or its nearest parent that exists."""
    path = Path(path).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = shutil.disk_usage(path)
    return Disk(str(path), usage.total, usage.free)


def _groups(root: Path, controller: str) -> list[Path]:
    """Directories of the process's control groups that bear on `controller`, innermost first.

    Inside a container `/proc/self/cgroup` may name a path that is not mounted here: missing directories
    are left out, and the mount's own top, which is then the container's group, always remains.
    """
    directories = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    mount = root / "sys/fs/cgroup"
    tops = {mount: "/", mount / controller: "/"}
    for line in lines:
        _, names, path = line.split(":", 2)
        if names == "":
            tops[mount] = path
        elif controller in names.split(","):
            tops[mount / names if (mount / names).exists() else mount / controller] = path
    for top, path in tops.items():
        # "/../.." points outside of what is mounted here
        inner = top if ".." in path else top / path.lstrip("/")
        directories += [d for d in (inner, *inner.parents) if d == top or top in d.parents]
    return directories


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cpu_quotas(root: Path) -> list[float]:
    quotas = []
    for directory in _groups(root, "cpu"):
        both = _read(directory / "cpu.max").split()
        if len(both) != 2:
            both = [_read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")]
        if both[0].isdigit() and both[1].isdigit() and int(both[1]) > 0:  # "max" and -1 mean no quota
            quotas.append(int(both[0]) / int(both[1]))
    return quotas


def _memory_limits(root: Path) -> list[tuple[int, int]]:
    limits = []
    for directory in _groups(root, "memory"):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most = _read(directory / limit)
            if not most.isdigit():
                continue
            now = _read(directory / used)
            # The group's use counts cached files, which the kernel drops on demand.
            stat = dict(line.split() for line in _read(directory / "memory.stat").splitlines() if " " in line)
            droppable = int(stat.get(cache, 0))
            limits.append((int(most), max(0, int(now) - droppable) if now.isdigit() else 0))
    return limits
