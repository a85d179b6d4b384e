"""One kind of chip for all x86-64 CPUs, so that all of them compute the same bits.

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
from typing import TYPE_CHECKING

from ..base import DeviceError
from .host_facts import text_in

if TYPE_CHECKING:
    import jax

FLAGS = ("--xla_cpu_max_isa=AVX", "--xla_cpu_enable_platform_dependent_math=false")
"""XLA's flags for the process. `xla_cpu_max_isa` has no effect as the option of a single program
(JAX 0.10.2)."""

CHIP = "x86-64, portable"
"""The kind of chip of every processor in portable mode."""


def portable() -> None:
    """Makes all x86-64 CPUs with AVX2 compute the same bits, for the rest of this process and for
    the processes that it starts.

    Call it before the first JAX operation, since XLA then reads its flags. Calling it again does
    nothing. It slows a CPU's programs (`benchmarks/portable.md`), and leaves accelerators as they
    are.

    Raises `DeviceError` on another processor, and if XLA has already read its flags.
    """
    here = platform.machine()
    if here.lower() not in ("x86_64", "amd64") or "avx2" not in _processor_flags():
        raise DeviceError("portable-elsewhere", machine=here)
    if asked():
        return
    from .jax_settings import started  # this imports JAX, as `_contracts`

    before = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([*before.split(), *FLAGS])
    if started() and _contracts():
        os.environ["XLA_FLAGS"] = before
        raise DeviceError("portable-too-late", flags=" ".join(FLAGS))


def asked() -> bool:
    """Whether the environment asks for portable mode."""
    return set(FLAGS) <= set(os.environ.get("XLA_FLAGS", "").split())


def active(device: jax.Device) -> bool:
    """Whether programs for `device` are portable. Raises `DeviceError` if the environment asks for
    it, but XLA had read its flags before."""
    if device.platform != "cpu" or not asked():
        return False
    if _contracts():
        raise DeviceError("portable-too-late", flags=" ".join(FLAGS))
    return True


@functools.cache
def _contracts() -> bool:
    """Whether XLA contracts `a * b + c` to one operation on this process's CPU, which rounds
    once."""
    import jax
    import numpy as np

    a, c = np.full(64, 1 + 2**-12, np.float32), np.full(64, -1 - 2**-11, np.float32)
    # A program of this process alone: JAX's cache may have one that other flags compiled
    mark = int.from_bytes(os.urandom(4))
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        rounded, _ = jax.jit(lambda a, c: (a * a + c, np.uint32(mark)))(a, c)
    return bool(np.asarray(rounded).any())


def _processor_flags() -> list[str]:
    lines = text_in("/proc/cpuinfo").splitlines()
    return next((line.split() for line in lines if line.startswith("flags")), [])
