"""Keeps JAX from JAX's CUDA plugin on a host without a GPU, where it is installed to compile for absent ones.

JAX loads every plugin that it finds, and each part of this one as JAX is imported: seconds, half a gigabyte
of libraries, and complaints about a driver that nobody expected. A host that shows no NVIDIA GPU cannot use
the plugin at all, so there JAX finds an empty one instead. Nothing is imported here but the standard library:
this runs at `import chipwise`.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

COMPILING = "CHIPWISE_COMPILES_FOR_GPUS"
"""Set in the process that wants the plugin although there is no GPU: to compile."""

GPUS = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""Where a host shows an NVIDIA GPU: those that JAX looks for (jax._src.hardware_utils)."""


def wanted() -> bool:
    """Whether a GPU is there, or the plugin is asked for by name (`JAX_PLATFORMS`) or to compile."""
    asked = os.environ.get("JAX_PLATFORMS", "").split(",")
    named = {"cuda", "gpu"} & {word.strip() for word in asked}
    return bool(named or os.environ.get(COMPILING)) or any(map(os.path.exists, GPUS))


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
