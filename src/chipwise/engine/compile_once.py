"""One compilation for all devices of a process: loads a compiled program on another device.

JAX compiles a program of one device again for each device, which takes most of a short run's time on eight
simulated devices. On the CPU, the machine code is serialized and loaded for the next device instead. It is
the same code, so results have the same bits. On GPUs, JAX's compilation cache has one entry for all devices.
With the cache enabled, a CPU program may come from it, and cannot be serialized again (JAX 0.10.2: its
functions are not found when it runs); then every device uses the cache.

This uses parts of `jax.experimental.serialize_executable` that may change. If it fails, JAX compiles.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable as serializing

from .placement import Group


def compile_on(groups: Sequence[Group], count: int, lower: Callable[[int, int], Any]) -> list[list[Any]]:
    """`count` programs compiled for each of `groups`: for each program, those of the groups.

    *Arguments:* `lower`: a function of the program's number and the group's, which lowers it. Compilation is
    parallel, since XLA releases the GIL.
    """
    with ThreadPoolExecutor(max(1, min(len(groups), os.cpu_count() or 1))) as pool:
        made = list(pool.map(lambda one: one.compile(), [lower(i, 0) for i in range(count)]))

        def again(i: int, g: int) -> Any:
            return lower(i, g).compile()

        def here(g: int) -> list[Any]:
            if len(groups[g].devices) > 1:
                return [again(i, g) for i in range(count)]
            return [
                on_device(one, groups[g].device, functools.partial(again, i, g)) for i, one in enumerate(made)
            ]

        return [list(each) for each in zip(made, *pool.map(here, range(1, len(groups))), strict=True)]


def on_device(compiled: Any, device: jax.Device, compile_again: Callable[[], Any]) -> Any:
    """`compiled`, a program of one device, for another `device`; `compile_again()` if it cannot be loaded."""
    if device.platform != "cpu" or jax.config.values["jax_compilation_cache_dir"] is not None:
        return compile_again()
    try:
        return _loaded(compiled, device)
    except Exception:  # private parts of JAX, which may raise anything in another version
        return compile_again()


def _loaded(compiled: Any, device: jax.Device) -> Any:
    from jax._src import compiler

    serialized, arguments, results = serializing.serialize(compiled)
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=1, device_assignment=np.array([[device.id]])
    )

    class Reader(serializing._JaxPjrtUnpickler):  # of bytes that this process has just written
        def persistent_load(self, pid: tuple[str, Any]) -> Any:
            if pid[0] == "exec":
                return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
            return device if pid[0] == "device" else super().persistent_load(pid)

    unloaded, info, no_kwargs = Reader(io.BytesIO(serialized), device.client, [device]).load()
    return jax.stages.Compiled(unloaded.load(), [], arguments.unflatten(info), results, no_kwargs=no_kwargs)
