"""Hides from JAX the plugins of chips that this host lacks, while JAX is imported and started.

JAX loads every plugin that it finds. The CUDA plugin takes seconds and half a gigabyte of memory,
and warns about the missing driver. libtpu takes a lock, and fails if another process has it. Both
are installed where plans are made, since they contain the compilers of absent chips. This module
imports only the standard library, because it must run before JAX is imported.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import os
import runpy
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

COMPILING = "CHIPWISE_COMPILES"
"""Set to "cuda" or "tpu" in a process that compiles for an absent chip."""

GPUS = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""The paths by which JAX detects an NVIDIA GPU (jax._src.hardware_utils)."""

TPUS = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*", "/lib/libtpu.so", "/usr/lib/libtpu.so")
"""Paths that hint at a TPU. None is proof (see `guard.accelerators`), but with any of them JAX
loads libtpu."""

TPU_VARIABLES = ("TPU_NAME", "TPU_WORKER_ID", "COLAB_TPU_ADDR")

LIBTPU = "CHIPWISE_LIBTPU"
"""The variable to which `TPU_LIBRARY_PATH` is moved meanwhile, since JAX would load that
library."""

CARDS = "/sys/bus/pci/devices"
_TPU_CARDS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
# Google's PCI devices that are TPUs; its vendor number also occurs on network cards and SSD
# controllers. Source: jax/_src/hardware_utils.py (JAX 0.10.2), which loads libtpu if it finds one
# of them.


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """A context in which JAX does not find the plugins of chips that this host lacks. Its end
    restores the modules and variables.

    JAX looks for plugins twice: when it is imported, and when it starts.
    """
    modules: dict[str, Any] = {}
    if not gpu_wanted():
        for cuda in ("12", "13"):
            plugin = ModuleType(f"jax_plugins.xla_cuda{cuda}", f"Empty, see {__name__}.")
            # The real one would register the plugin
            plugin.initialize = lambda: None  # type: ignore[attr-defined]
            # An import of None fails
            modules |= {plugin.__name__: plugin, f"jax_cuda{cuda}_plugin": None}
    libtpu = None
    if tpu_wanted():
        for level in ("TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL"):
            os.environ.setdefault(level, "3")  # libtpu's failures also raise errors
    else:
        modules["libtpu"] = None
        if libtpu := os.environ.pop("TPU_LIBRARY_PATH", None):
            os.environ[LIBTPU] = libtpu
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)
        if libtpu:
            os.environ["TPU_LIBRARY_PATH"] = libtpu
            del os.environ[LIBTPU]


def call_hidden(module: str, function: str, *arguments: Any) -> Any:
    """Calls a function in a process of chipwise's own. The process imports the function's module,
    and JAX, with the plugins hidden."""
    with hidden():
        return getattr(importlib.import_module(module), function)(*arguments)


def gpu_wanted() -> bool:
    """Whether the host has a GPU, or the plugin is requested (`JAX_PLATFORMS`) or used to
    compile."""
    return _requested("cuda", "gpu") or any(map(os.path.exists, GPUS))


def tpu_wanted() -> bool:
    """Whether the host may have a TPU, or libtpu is requested (`JAX_PLATFORMS`) or used to
    compile."""
    hinted = any(map(os.environ.get, TPU_VARIABLES)) or any(map(glob.glob, TPUS))
    return _requested("tpu") or hinted or any(map(tpu_card, glob.glob(f"{CARDS}/*")))


def tpu_card(device: str) -> bool:
    """Whether a PCI device is a TPU. *Arguments:* `device`, its folder in `/sys`."""
    return text_in(f"{device}/vendor") == "0x1ae0" and text_in(f"{device}/device") in _TPU_CARDS


def text_in(path: str | os.PathLike) -> str:
    """The text of a system file, without surrounding spaces. Empty if the file cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _requested(*platforms: str) -> bool:
    named = {word.strip() for word in os.environ.get("JAX_PLATFORMS", "").split(",")}
    return bool(named.intersection(platforms)) or os.environ.get(COMPILING) in platforms


# `python -m chipwise.machine.plugins MODULE ARGUMENT...`, of chipwise's own
if __name__ == "__main__":
    del sys.argv[0]
    with hidden():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
