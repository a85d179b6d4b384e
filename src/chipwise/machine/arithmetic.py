"""What can change a bit besides recipe and chip: JAX's settings are fixed, XLA's flags are refused, and
versions are recorded and compared."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from ..errors import DeviceError
from .host_facts import installed

_FIXED: dict[str, Any] = {
    "eager_constant_folding": False,
    "jax_allow_f16_reductions": True,
    "jax_bcoo_cusparse_lowering": False,
    "jax_compiler_enable_remat_pass": True,
    "jax_custom_vjp3": False,
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_disable_jit": False,
    "jax_enable_custom_prng": False,
    "jax_enable_pgle": False,
    "jax_enable_x64": False,
    "jax_exec_time_optimization_effort": 0.0,
    "jax_high_dynamic_range_gumbel": False,
    "jax_memory_fitting_effort": 0.0,
    "jax_memory_fitting_level": "O2",
    "jax_optimization_level": "UNKNOWN",
    "jax_random_seed_offset": 0,
    "jax_ragged_dot_use_ragged_dot_instruction": True,
    "jax_remat3": False,
    "jax_scan3": False,
    "jax_softmax_custom_jvp": False,
    "jax_threefry_gpu_kernel_lowering": False,
    "jax_threefry_partitionable": True,
    "jax_transfer_guard_device_to_device": "allow",
    "jax_transfer_guard_device_to_host": "allow",
    "jax_transfer_guard_host_to_device": "allow",
    "jax_use_direct_linearize": True,
    "jax_use_shardy_partitioner": True,
}
"""JAX's own defaults (0.10.2), by name: settings that choose types, random numbers, products or programs, and
those with which a run fails."""
_HARMLESS = (
    "--xla_force_host_platform_device_count",
    "--xla_dump_",
    "--xla_hlo_",
    "--xla_gpu_cuda_data_dir",
    "--xla_gpu_deterministic_ops=true",
    "--xla_gpu_enable_latency_hiding_scheduler",
    "--xla_cpu_collective_call_",
    "--xla_gpu_nccl_",
)
_COMPARED = ("chipwise", "jax", "jaxlib", "libtpu", "flax", "optax", "numpy")
_lock, _inside, _before = threading.Lock(), 0, dict[str, Any]()


@contextlib.contextmanager
def fixed() -> Iterator[None]:
    """A context, or a function's decorator, in which JAX computes as by default, whatever the process has
    set: in this thread, and in those that it starts. The last of several contexts puts the settings back."""
    global _inside
    from jax._src.config import config_states as states

    with contextlib.ExitStack() as own:
        with _lock:
            if _inside == 0:
                _before.clear()
                for name, wanted in _FIXED.items():
                    if name in states and _other(states[name].get_global(), wanted):
                        _before[name] = states[name].get_global()
                        states[name]._set(wanted)
            _inside += 1
        try:
            for name, wanted in _FIXED.items():  # those of `with jax.enable_x64(True):` in this thread
                if name in states and _other(states[name].value, wanted):
                    own.enter_context(states[name](wanted))
            yield
        finally:
            own.close()
            with _lock:
                _inside -= 1
                if _inside == 0:
                    for name, value in _before.items():
                        states[name]._set(value)


def _other(value: Any, wanted: Any) -> bool:
    value = getattr(value, "value", value)  # of an enumeration
    return value != wanted and not (value is None and wanted == "allow")


def check_flags(platform: str) -> None:
    """Raises `DeviceError` for variables of the environment by which XLA computes other bits."""
    if found := _flags(platform):
        variable, value = next(iter(found.items()))
        text = (
            "{variable} has {value}, which may change results: unset it, or train with --no-exact "
            "(On(exact=False))."
        )
        raise DeviceError("flags-change-results", text, variable=variable, value=value)


def settings() -> dict[str, str]:
    """What the environment says to compilers and libraries, and may change a bit: variable to value."""
    return _flags("gpu") | {v: os.environ[v] for v in ("LIBTPU_INIT_ARGS",) if os.environ.get(v)}


def _flags(platform: str) -> dict[str, str]:
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_HARMLESS)]
    found = {"XLA_FLAGS": " ".join(flags)} if flags else {}
    override = os.environ.get("NVIDIA_TF32_OVERRIDE") if platform == "gpu" else None
    return found | ({"NVIDIA_TF32_OVERRIDE": override} if override else {})


def versions() -> dict[str, str | None]:
    """The versions of the packages that compute."""
    return {package: installed(package) for package in _COMPARED}
