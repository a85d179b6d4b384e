"""Facts about this host that do not come from JAX, collected in one plain object.

Functions that look for platforms, missing accelerators and problems use only a `HostFacts`, so a
test can describe Colab, a Kaggle TPU or a broken GPU machine as a value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from .plugins import text_in, tpu_card

# Paths whose existence is informative, as patterns below the root directory
MARKERS = (
    "dev/nvidia[0-9]*",
    "proc/driver/nvidia",
    # TPU v2 to v4. Not dev/accel/accel0: that directory is Linux's, for laptop NPUs.
    "dev/accel[0-9]*",
    "dev/vfio/[0-9]*",  # TPU v5e and later; also any device lent to a virtual machine
    "lib/libtpu.so",
    "usr/lib/libtpu.so",
)

LISTED = ("chipwise", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy")
PACKAGES = (
    *LISTED,
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt", "torch-xla"),
)


@dataclass(frozen=True)
class HostFacts:
    """Facts about a host. By default, it has nothing."""

    environment: Mapping[str, str] = field(default_factory=dict)
    paths: frozenset[str] = frozenset()  # the existing ones of `MARKERS`, absolute
    # The installed ones of `PACKAGES`, to version
    packages: Mapping[str, str] = field(default_factory=dict)
    nvidia_driver: str | None = None  # such as "535.104.05"
    pci_tpu_chips: int = 0

    def matching(self, pattern: str) -> list[str]:
        """The existing paths that match a regular expression completely, sorted."""
        return sorted(p for p in self.paths if re.fullmatch(pattern, p))


def gather(root: str | Path = "/", environment: Mapping[str, str] | None = None) -> HostFacts:
    """The facts of this host. Never raises: omits facts that cannot be read.

    *Arguments:* `root`: the directory of `dev`, `proc` and `sys`. `environment`: by default
    `os.environ`.
    """
    root = Path(root)
    return HostFacts(
        environment=dict(os.environ if environment is None else environment),
        paths=frozenset(
            "/" + str(p.relative_to(root)) for marker in MARKERS for p in _glob(root, marker)
        ),
        packages={name: version for name in PACKAGES if (version := installed(name))},
        nvidia_driver=_nvidia_driver(root),
        pci_tpu_chips=sum(tpu_card(str(p)) for p in _glob(root, "sys/bus/pci/devices/*")),
    )


def installed(package: str) -> str | None:
    """The version of an installed distribution, or `None`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _glob(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(root.glob(pattern))
    except OSError:
        return []


def _nvidia_driver(root: Path) -> str | None:
    version = text_in(root / "sys/module/nvidia/version")
    if not version:
        # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build ..."
        version = text_in(root / "proc/driver/nvidia/version")
    found = re.search(r"(?<![\d.])\d{3}\.\d+(?:\.\d+)?(?![\d.])", version)
    return found[0] if found else None
