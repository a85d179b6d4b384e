"""This host's processor as a chip whose peak and bandwidth were measured: half a second, when asked."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp

from ..chips.catalogue import Chip, named

_SIDE = 1024
_COPY_BYTES = 128 * 2**20


@cache
def host_cpu_chip() -> Chip:
    """The catalogue's CPU with `fp32_tflops` of a product of 1,024 x 1,024 matrices and `memory_GBps` of
    adding one to 128 MB, both by JAX on all cores. Measured once a process, best of a few."""
    chip = named("cpu")
    assert chip is not None
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        a = jnp.ones((_SIDE, _SIDE), jnp.float32)
        product = _best(jax.jit(lambda a: jax.lax.dot(a, a, precision="highest")), a)
        x = jnp.zeros((_COPY_BYTES // 4,), jnp.float32)
        copy = _best(jax.jit(lambda x: x + jnp.float32(1)), x)
    return dataclasses.replace(
        chip,
        fp32_tflops=2 * _SIDE**3 / product / 1e12,
        memory_GBps=2 * _COPY_BYTES / copy / 1e9,
        notes="peak and bandwidth measured on this host",
    )


def _best(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Seconds of the fastest of some calls, within about a fifth of a second."""
    function(x).block_until_ready()
    best, end = float("inf"), time.perf_counter() + 0.2
    while time.perf_counter() < end:
        start = time.perf_counter()
        function(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best
