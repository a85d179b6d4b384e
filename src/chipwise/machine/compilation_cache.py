"""JAX's compilation cache, so that a recipe's second run starts at once, and a study compiles a
program once.

Programs of the cache run without further checks, so a folder is used only if nobody but the user
can change it. JAX's key contains the program, the versions and the compiler's options. This module
adds the processor, since the code uses its instructions. CPU devices share an entry. Otherwise
eight simulated devices would compile eight times. Contexts change JAX for this and restore it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import platform
import stat
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from ..base.files import put_inside
from .plugins import text_in

BYTES = 1 << 30  # of the folder; the least recently used programs are deleted
FOLDER = "jax_compilation_cache_dir"
SETTINGS = {  # which programs are stored: those that take longer to compile than to read
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextlib.contextmanager
def cached_in(folder: Path) -> Iterator[bool]:
    """A context in which `folder` is JAX's compilation cache.

    *Yields* whether it is. It is not if the user has set or disabled JAX's cache, or if others
    could write to `folder`.
    """
    chosen = "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.values[FOLDER]
    ours = not chosen and _private(folder)
    with contextlib.ExitStack() as entered:
        if chosen or ours:
            entered.enter_context(portable_entries())
        if ours:
            shorten(folder)
            entered.enter_context(_settings({FOLDER: str(folder), **SETTINGS}))
        yield ours


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """A context in which no program is compiled twice. A cache that is already set stays in use.
    Otherwise the context has a cache of its own.

    A run's seed and the values of its schedules are inputs of the compiled programs, so runs of a
    study that differ only in these share programs.
    """
    with portable_entries():
        if jax.config.values[FOLDER]:
            yield
            return
        with (
            tempfile.TemporaryDirectory(prefix="chipwise-compiled-") as folder,
            _settings({FOLDER: folder, **SETTINGS}),
        ):
            yield


def compile_on(groups: int, count: int, lower: Callable[[int, int], Any]) -> list[list[Any]]:
    """Compiles `count` programs for `groups` groups of devices. *Returns* for each program its
    versions for the groups. Those of the first group are compiled. Those of the others are read
    from the cache, so they are the same code and give the same bits.

    *Arguments:* `lower`: a function of the program's number and the group's, which lowers it.
    Compilation is parallel, since XLA releases the GIL.
    """

    def here(g: int) -> list[Any]:
        return [lower(i, g).compile() for i in range(count)]

    once = compiled_once() if groups > 1 else contextlib.nullcontext()
    with once, ThreadPoolExecutor(max(1, min(groups, os.cpu_count() or 1))) as pool:
        first = list(pool.map(lambda one: one.compile(), [lower(i, 0) for i in range(count)]))
        return [list(each) for each in zip(first, *pool.map(here, range(1, groups)), strict=True)]


@contextlib.contextmanager
def _settings(values: dict[str, Any]) -> Iterator[None]:
    before = {name: jax.config.values[name] for name in values}

    def update(values: dict[str, Any]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX reads these settings once, at the first compilation

    update(values)
    try:
        yield
    finally:
        update(before)


def _private(folder: Path) -> bool:
    """Whether `folder` exists or could be created, and nobody but the user can enter or replace
    it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not hasattr(os, "geteuid"):  # Windows keeps a user's folders from others by other means
            return stat.S_ISDIR(status.st_mode)
        own = (
            stat.S_ISDIR(status.st_mode)
            and status.st_uid == os.geteuid()
            and not status.st_mode & 0o077
        )
        return own and not _replaceable(folder)
    except OSError:
        return False


def _replaceable(folder: Path) -> bool:
    """Whether others could replace `folder`, since they can write to one of its parents."""
    for parent in reversed(folder.resolve().parents):
        status = parent.stat()
        if not status.st_mode & 0o011:  # others cannot enter
            return False
        group = status.st_mode & 0o020 and status.st_gid != os.getegid()
        if (group or status.st_mode & 0o002) and not status.st_mode & stat.S_ISVTX:
            return True
    return False


def shorten(folder: Path) -> None:
    """Deletes the least recently used files until at most `BYTES` are left."""
    files = []
    for path in folder.iterdir():
        try:
            status = path.stat()
        except FileNotFoundError:  # another process deletes files too
            continue
        if stat.S_ISREG(status.st_mode):  # XLA has its own folder there
            files.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    left = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if left <= BYTES:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        left -= size


@contextlib.contextmanager
def portable_entries() -> Iterator[None]:
    """A context in which JAX's keys depend on the processor, but not on the CPU device, and its
    entries are written atomically. JAX never replaces an entry, so every later process would fail
    to read one that a killed process had written in part."""
    from jax._src import cache_key
    from jax._src.lib import xla_client
    from jax._src.lru_cache import LRUCache

    key = cache_key.get
    put = LRUCache.put
    suffix = processor()
    if hasattr(key, "__wrapped__"):  # in an outer context
        yield
        return

    def get(
        module: Any,
        devices: np.ndarray,
        compile_options: Any,
        backend: Any,
        *rest: Any,
        **more: Any,
    ) -> str:
        if backend.platform == "cpu" and devices.size == 1:
            compile_options = copy.deepcopy(compile_options)
            compile_options.device_assignment = xla_client.DeviceAssignment.create(
                np.zeros((1, 1), np.int32)
            )
        return f"{key(module, devices, compile_options, backend, *rest, **more)}-{suffix}"

    def put_atomically(cache: Any, key: str, value: bytes) -> None:
        entry = Path(str(cache.path), f"{key}-cache")
        # JAX has a lock, or it is no local folder
        if cache.eviction_enabled or not entry.parent.is_dir():
            put(cache, key, value)
        elif not entry.exists():
            # With the user's umask, since others may share the user's folder
            put_inside(entry, value, durable=False)

    get.__wrapped__ = key  # type: ignore[attr-defined]
    cache_key.get, LRUCache.put = get, put_atomically  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        cache_key.get, LRUCache.put = key, put  # type: ignore[method-assign]


def processor() -> str:
    """A hash of what compiled code depends on: the processor's features, and the number of threads
    into which work is divided."""
    lines = text_in("/proc/cpuinfo").splitlines() or [platform.processor()]
    fields = ("model name", "flags", "Features", "CPU part")
    features = sorted({line for line in lines if line.startswith(fields)} or set(lines[:1]))
    usable = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    threads = os.environ.get("NPROC") or str(len(usable))
    return hashlib.sha256("\n".join([*features, threads]).encode()).hexdigest()[:12]
