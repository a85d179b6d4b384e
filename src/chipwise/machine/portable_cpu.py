"""Compiles for x86-64 CPUs in general, so that different ones compute the same bits more often.

XLA compiles for the processor that it finds. Three things then depend on the processor: where LLVM
contracts a product and a sum to one operation, which approximation of the reciprocal square root
the processor has, and how the library for products walks through a transposed left factor. In
portable mode the process compiles for AVX alone, which has nothing to contract. The reciprocal root
is divided out. `products.apart` transposes before a product, in an operation of its own.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..base import DeviceError
from .host_facts import text_in

if TYPE_CHECKING:
    import jax

FLAGS = ("--xla_cpu_max_isa=AVX", "--xla_cpu_enable_platform_dependent_math=false")
"""XLA's flags for the process. `xla_cpu_max_isa` has no effect as the option of a single program
(JAX 0.10.2)."""


def portable() -> None:
    """Compiles for x86-64 CPUs with AVX2 in general under Linux, for the rest of this process and
    for the processes that it starts. Different CPUs then compute the same bits for some recipes,
    not yet for all: `benchmarks/portable.md` says which were compared.

    Call it before the first JAX operation, since XLA then reads its flags. Calling it again does
    nothing. It slows a CPU's programs, and leaves accelerators as they are.

    Raises `DeviceError` on another processor or system, and if JAX has already started.
    """
    system, here = platform.system(), platform.machine()
    if (system, here) != ("Linux", "x86_64") or "avx2" not in text_in("/proc/cpuinfo").split():
        raise DeviceError("portable-elsewhere", system=system, machine=here)
    if asked():
        return
    from .jax_settings import started  # this imports JAX, as `_obeys`

    if started():
        raise DeviceError("portable-too-late", flags=" ".join(FLAGS))
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *FLAGS])


def asked() -> bool:
    """Whether the environment asks for portable mode."""
    return set(FLAGS) <= set(os.environ.get("XLA_FLAGS", "").split())


def active(device: jax.Device) -> bool:
    """Whether programs for `device` are portable. Raises `DeviceError` if the environment asks for
    it, but XLA had read its flags before."""
    if device.platform != "cpu" or not asked():
        return False
    if not _obeys():
        raise DeviceError("portable-too-late", flags=" ".join(FLAGS))
    return True


def everywhere(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as `active` devices compute it, if JAX's default devices are."""
    import jax

    from .products import apart

    return apart(function) if asked() and active(jax.devices()[0]) else function


@functools.cache
def _obeys() -> bool:
    """Whether XLA compiles for this process's CPU as `FLAGS` say. It is measured: `a * b + c` then
    rounds twice, and a reciprocal root is divided."""
    import jax
    import numpy as np

    # Programs of this process alone: JAX's cache may have those that other flags compiled
    mark = np.uint32(int.from_bytes(os.urandom(4)))
    a, c = np.full(64, 1 + 2**-12, np.float32), np.full(64, -1 - 2**-11, np.float32)
    x = np.linspace(0.1, 9.0, 4096, dtype=np.float32)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        rounded, root, _ = jax.jit(lambda a, c, x: (a * a + c, jax.lax.rsqrt(x), mark))(a, c, x)
    divided = np.float32(1) / np.sqrt(x)
    return not np.asarray(rounded).any() and bool((np.asarray(root) == divided).all())
