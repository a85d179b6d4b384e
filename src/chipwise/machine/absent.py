"""Keeps JAX from the compilers of absent chips, where they are installed only to compile: its CUDA plugin on
a host without a GPU, libtpu on one without a TPU.

JAX loads every plugin that it finds. The CUDA plugin takes seconds, half a gigabyte of libraries, and
complains about a driver that nobody expected; libtpu holds a lock, and complains when another process has it.
A host that shows no such chip cannot use them at all, so there JAX finds none. Nothing is imported here but
the standard library: this runs at `import chipwise`.
"""

from __future__ import annotations

import glob
import os
import sys
from types import ModuleType

COMPILING = "CHIPWISE_COMPILES"
"""Set, to "cuda" or "tpu", in the process that wants this compiler although the chip is absent."""

GPUS = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""Where a host shows an NVIDIA GPU: those that JAX looks for (jax._src.hardware_utils)."""

TPUS = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*", "/lib/libtpu.so", "/usr/lib/libtpu.so")
"""Where a host may show a TPU. None is proof (`guard.accelerators`), but each is reason to let JAX look."""

TPU_VARIABLES = ("TPU_NAME", "TPU_WORKER_ID", "COLAB_TPU_ADDR")

LIBTPU = "CHIPWISE_LIBTPU"
"""Where `TPU_LIBRARY_PATH` is kept, which JAX would follow. Importing the package libtpu sets it too."""

CARDS = "/sys/bus/pci/devices"
_TPU_CARDS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
# Google's PCI devices that are TPUs; its vendor number is also on network cards and SSD controllers.
# Source: jax/_src/hardware_utils.py (JAX 0.10.2), which decides with them whether to load libtpu.


def wanted() -> bool:
    """Whether a GPU is there, or the plugin is asked for by name (`JAX_PLATFORMS`) or to compile."""
    return _asked("cuda", "gpu") or any(map(os.path.exists, GPUS))


def tpu_wanted() -> bool:
    """Whether a TPU may be there, or libtpu is asked for by name or to compile."""
    shown = any(map(os.environ.get, TPU_VARIABLES)) or any(map(glob.glob, TPUS))
    return _asked("tpu") or shown or any(map(tpu_card, glob.glob(f"{CARDS}/*")))


def tpu_card(device: str) -> bool:
    """Whether the folder of a PCI device, below `/sys`, is that of a TPU."""
    return _text(f"{device}/vendor") == "0x1ae0" and _text(f"{device}/device") in _TPU_CARDS


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _asked(*platforms: str) -> bool:
    named = {word.strip() for word in os.environ.get("JAX_PLATFORMS", "").split(",")}
    return bool(named.intersection(platforms)) or os.environ.get(COMPILING) in platforms


def leave_libtpu_alone() -> None:
    """Makes libtpu seem not installed, unless it is wanted; then its log is silenced: what
    fails there comes as an error too."""
    if tpu_wanted():
        for level in ("TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL"):
            os.environ.setdefault(level, "3")
    else:
        if path := os.environ.pop("TPU_LIBRARY_PATH", ""):
            os.environ[LIBTPU] = path
        # Importing it fails, also where JAX was imported before: it loads the library later
        sys.modules["libtpu"] = None  # type: ignore[assignment]


def leave_cuda_alone() -> None:
    """Puts empty modules in the place of JAX's CUDA plugin, unless it is `wanted`."""
    if wanted():
        return

    def nothing() -> None:
        """In the place of what registers the plugin."""

    for cuda in ("12", "13"):
        name = f"jax_plugins.xla_cuda{cuda}"
        plugin = ModuleType(name, "Empty: this host shows no NVIDIA GPU. See chipwise.machine.absent.")
        plugin.initialize = nothing  # type: ignore[attr-defined]
        sys.modules.setdefault(name, plugin)
        # None: importing it fails, as if it were not installed
        sys.modules.setdefault(f"jax_cuda{cuda}_plugin", None)  # type: ignore[arg-type]
