"""Compiled programs kept on disk, so that a recipe's second run starts at once: JAX's compilation cache.

These programs are run without further checks, so the folder must belong to the user alone, or it is not used.
JAX's key covers the program, the versions and the compiler's options; the processor is added here, since the
code uses its instructions. And a CPU's devices share an entry: eight simulated ones would otherwise compile
eight times.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import os
import platform
import stat
import uuid
from pathlib import Path
from typing import Any

import jax
import numpy as np

BYTES = 1 << 30  # kept; beyond it the programs used longest ago go
SETTINGS = {  # of what takes so long to compile that reading it back is faster
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def keep(folder: Path) -> bool:
    """From here on, this process looks for compiled programs in `folder` and leaves there what it compiles.

    *Returns* whether it does: not where the user has chosen a folder, or none, for JAX's cache, and not where
    others could write to `folder`.
    """
    chosen = "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.values["jax_compilation_cache_dir"]
    if not chosen and not _private(folder):
        return False
    key_by_processor()
    write_whole()
    if chosen:
        return False
    _shorten(folder)
    for name, value in {"jax_compilation_cache_dir": str(folder), **SETTINGS}.items():
        jax.config.update(name, value)
    return True


def _private(folder: Path) -> bool:
    """Whether `folder` is there, made if it was not, and nobody but the user can enter or replace it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077
        return own and not _replaceable(folder)
    except OSError:
        return False


def _replaceable(folder: Path) -> bool:
    """Whether others could put another folder in its place: through one above it that they may write to."""
    for above in reversed(folder.resolve().parents):
        about = above.stat()
        if not about.st_mode & 0o011:  # nobody else comes further
            return False
        group = about.st_mode & 0o020 and about.st_gid != os.getegid()
        if (group or about.st_mode & 0o002) and not about.st_mode & stat.S_ISVTX:
            return True
    return False


def _shorten(folder: Path) -> None:
    """Deletes what was used longest ago, until `BYTES` are left."""
    found = []
    for path in folder.iterdir():
        try:
            about = path.stat()
        except FileNotFoundError:  # another process deletes too
            continue
        if stat.S_ISREG(about.st_mode):  # XLA keeps a folder of its own there
            found.append((max(about.st_atime, about.st_mtime), about.st_size, path))
    left = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left <= BYTES:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        left -= size


def key_by_processor() -> None:
    """From here on, JAX's key differs by processor, and not by a CPU's devices."""
    from jax._src import cache_key
    from jax._src.lib import xla_client

    if hasattr(cache_key.get, "__wrapped__"):
        return
    key, here = cache_key.get, processor()

    def get(
        module: Any, devices: np.ndarray, compile_options: Any, backend: Any, *rest: Any, **more: Any
    ) -> str:
        if backend.platform == "cpu" and devices.size == 1:
            compile_options = copy.deepcopy(compile_options)
            compile_options.device_assignment = xla_client.DeviceAssignment.create(np.zeros((1, 1), np.int32))
        return f"{key(module, devices, compile_options, backend, *rest, **more)}-{here}"

    get.__wrapped__ = key  # type: ignore[attr-defined]
    cache_key.get = get


@functools.cache
def write_whole() -> None:
    """From here on, an entry appears whole or not at all: one that a killed process had half written would be
    read in vain by every later one, since JAX writes no entry again that is there."""
    from jax._src.lru_cache import LRUCache

    put = LRUCache.put

    def whole(cache: Any, key: str, value: bytes) -> None:
        to = Path(str(cache.path), f"{key}-cache")
        if cache.eviction_enabled or not to.parent.is_dir():  # under a lock of JAX's, or not on a disk here
            put(cache, key, value)
        elif not to.exists():
            temporary = to.with_name(f".{uuid.uuid4().hex}")
            try:
                temporary.write_bytes(value)  # with the user's umask, since others may share a chosen folder
                os.replace(temporary, to)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise

    LRUCache.put = whole  # type: ignore[method-assign,assignment]


def processor() -> str:
    """A short name of what compiled code depends on here: the processor's features, and the size of the pool
    of threads for which work is cut."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    told = ("model name", "flags", "Features", "CPU part")
    about = sorted({line for line in lines if line.startswith(told)} or set(lines[:1]))
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    threads = os.environ.get("NPROC") or str(len(usable))
    return hashlib.sha256("\n".join([*about, threads]).encode()).hexdigest()[:12]
