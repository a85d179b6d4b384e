"""How XLA compiles chipwise's programs for a device: its options, and functions jitted with
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..chips import find
from . import kernels
from .portable_cpu import active
from .products import apart

GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONVOLUTION"
"""The commands that XLA starts in CUDA graphs: its default, and convolutions."""

LOOPS = {
    "xla_gpu_enable_command_buffer": f"{GRAPHS},WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}
"""XLA's options for a GPU's program that is a loop, so that all of it is one CUDA graph. XLA counts
a loop as one command, and by default a graph needs five."""


def jitted(
    function: Callable[..., Any],
    device: jax.Device,
    *,
    exact: bool = True,
    shards: int = 1,
    loops: bool = False,
    **about: Any,
) -> Any:
    """`function` jitted for devices like `device`, in groups of `shards`, with `compiler_options`
    and, for exact programs of GPUs, `kernels.options`. In `portable` mode, its products are
    `apart`. *Arguments:* `loops`: adds `LOOPS` on a GPU. `about`: others of `jax.jit`."""
    options = compiler_options(device.platform, exact, device.device_kind, shards)
    if more := kernels.options(device.platform, exact):
        options = {**(options or {}), **more}
    if loops and device.platform == "gpu":
        options = {**(options or {}), **LOOPS}
    function = apart(function) if active(device) else function
    return jax.jit(function, compiler_options=options, **about)


def compiler_options(
    platform: str, exact: bool, device_kind: str, shards: int = 1
) -> dict[str, Any] | None:
    """XLA's options for the programs of a step on a JAX device of `device_kind`.

    For reproducible results, GPUs use no atomics, and no kernel chosen by timing. XLA takes the
    first kernel that cuDNN and cuBLASLt propose for the shape. `xla_gpu_autotune_level=0` does not
    do that. It chooses no kernel for a convolution, and cuDNN's default took 3,000 times as long
    (bfloat16, 3x3, 64 to 128 channels, an H200 with JAX 0.11.2). Triton's matrix products, untuned,
    have tiles of 16 x 8, which use a few per cent of the chip, so they are off.

    Groups of `shards` GPUs use the scheduler that starts a collective before its result is needed.
    XLA turns it on by itself only for some chips, such as H100. It changes the order of operations,
    not what they add. TPUs use `SCOPED_VMEM_KIB`.

    CUDA graphs include convolutions, which XLA leaves out. Otherwise a small net's step waits for
    the host to start its kernels one by one. On an H100 a step of `mnist` took 6.8 ms without and
    takes 2.3 ms with them, one of `cifar10-davidnet` 9.5 ms and 8.4 ms, with the same bits.
    """
    if platform in ("gpu", "cuda", "rocm"):
        return _gpu_options(exact, shards)
    if platform == "cpu":
        return None
    chip = find(device_kind)
    if chip is not None and chip.names[0] in SCOPED_VMEM_KIB:
        return {"xla_tpu_scoped_vmem_limit_kib": SCOPED_VMEM_KIB[chip.names[0]]}
    return None


def _gpu_options(exact: bool, shards: int) -> dict[str, Any]:
    options: dict[str, Any] = {"xla_gpu_enable_command_buffer": GRAPHS}
    if exact:
        options |= {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}
    if shards > 1:
        options["xla_gpu_enable_latency_hiding_scheduler"] = True
    return options


SCOPED_VMEM_KIB = {"v6e": 65_536, "v5p": 32_768}
"""On-chip memory for one fusion. libtpu's default makes large products slow. For 24,576 x 4,096 x
14,336 in bfloat16 libtpu 0.0.42 states 840 TFLOP/s with it and 559 without on a v6e, 451 and 390 on
a v5p. On other TPUs it makes little difference. Google's recipes for the v6e raise it too
(github.com/AI-Hypercomputer/tpu-recipes)."""
