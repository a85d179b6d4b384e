"""Keeps JAX from loading compilers of absent chips, which are installed only to compile: the CUDA plugin on a
host without a GPU, and libtpu on a host without a TPU.

JAX loads every plugin that it finds. The CUDA plugin takes seconds and half a gigabyte of memory, and warns
about the missing driver; libtpu takes a lock, and fails if another process has it. A host without such a chip
cannot use the plugin, so it is hidden from JAX. This runs at `import chipwise`, so it imports only the
standard library.
"""

from __future__ import annotations

import glob
import os
import sys
from types import ModuleType

COMPILING = "CHIPWISE_COMPILES"
"""Set to "cuda" or "tpu" in a process that compiles for an absent chip."""

GPUS = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""The paths by which JAX detects an NVIDIA GPU (jax._src.hardware_utils)."""

TPUS = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*", "/lib/libtpu.so", "/usr/lib/libtpu.so")
"""Paths that hint at a TPU. None is proof (see `guard.accelerators`), but with any of them JAX loads
libtpu."""

TPU_VARIABLES = ("TPU_NAME", "TPU_WORKER_ID", "COLAB_TPU_ADDR")

LIBTPU = "CHIPWISE_LIBTPU"
"""The variable to which `TPU_LIBRARY_PATH` is moved, since JAX would load it. Importing libtpu also sets
that.
"""

CARDS = "/sys/bus/pci/devices"
_TPU_CARDS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
# Google's PCI devices that are TPUs; its vendor number also occurs on network cards and SSD controllers.
# Source: jax/_src/hardware_utils.py (JAX 0.10.2), which loads libtpu if it finds one of them.


def wanted() -> bool:
    """Whether the host has a GPU, or the plugin is requested (`JAX_PLATFORMS`) or used to compile."""
    return _requested("cuda", "gpu") or any(map(os.path.exists, GPUS))


def tpu_wanted() -> bool:
    """Whether the host may have a TPU, or libtpu is requested (`JAX_PLATFORMS`) or used to compile."""
    hinted = any(map(os.environ.get, TPU_VARIABLES)) or any(map(glob.glob, TPUS))
    return _requested("tpu") or hinted or any(map(tpu_card, glob.glob(f"{CARDS}/*")))


def tpu_card(device: str) -> bool:
    """Whether a PCI device is a TPU. *Arguments:* `device`, its folder in `/sys`."""
    return _text(f"{device}/vendor") == "0x1ae0" and _text(f"{device}/device") in _TPU_CARDS


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _requested(*platforms: str) -> bool:
    named = {word.strip() for word in os.environ.get("JAX_PLATFORMS", "").split(",")}
    return bool(named.intersection(platforms)) or os.environ.get(COMPILING) in platforms


def leave_libtpu_alone() -> None:
    """Hides libtpu from JAX, unless it is wanted; then silences its log, since failures also raise errors."""
    if tpu_wanted():
        for level in ("TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL"):
            os.environ.setdefault(level, "3")
    else:
        if path := os.environ.pop("TPU_LIBRARY_PATH", ""):
            os.environ[LIBTPU] = path
        # So its import fails, even if JAX was imported before, since JAX loads the library later.
        sys.modules["libtpu"] = None  # type: ignore[assignment]


def leave_cuda_alone() -> None:
    """Replaces JAX's CUDA plugin by empty modules, unless it is `wanted`."""
    if wanted():
        return

    def nothing() -> None:
        """Replaces the function that registers the plugin."""

    for cuda in ("12", "13"):
        name = f"jax_plugins.xla_cuda{cuda}"
        plugin = ModuleType(name, "Empty: this host shows no NVIDIA GPU. See chipwise.machine.absent.")
        plugin.initialize = nothing  # type: ignore[attr-defined]
        sys.modules.setdefault(name, plugin)
        # With None its import fails, as if it were not installed.
        sys.modules.setdefault(f"jax_cuda{cuda}_plugin", None)  # type: ignore[arg-type]
