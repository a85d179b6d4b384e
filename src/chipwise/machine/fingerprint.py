"""The machine and the software of a measurement, with a short hash to compare machines."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.json_types import part
from .host_facts import installed
from .limits import cores, memory
from .plugins import text_in

PACKAGES = ("chipwise", "jax", "jaxlib", "numpy", "simplejpeg")
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fingerprint:
    """The machine and the software of a measurement. Sizes are in bytes. `None` means unknown or
    absent."""

    cpu: str  # the model, as the system names it
    cores: float  # usable by this process: affinity and quotas count
    memory_bytes: int  # that this process may use
    os: str
    python: str
    versions: dict[str, str | None]  # of `PACKAGES`; `None`: not installed
    accelerator: str | None  # JAX's device kind
    accelerators: int
    commit: str | None  # of chipwise, when it runs from a git checkout
    dirty: bool | None  # whether that checkout had changes

    @property
    def hash(self) -> str:
        """Eight hexadecimal digits, equal for equal hardware and operating system.

        Excludes versions, which are compared on one machine. Memory is rounded to GiB, since
        kernels reserve different amounts.
        """
        hardware = [
            self.cpu,
            self.cores,
            round(self.memory_bytes / 2**30),
            self.os.partition(" ")[0],
            self.accelerator,
            self.accelerators,
        ]
        return hashlib.sha256(json.dumps(hardware).encode()).hexdigest()[:8]

    @property
    def title(self) -> str:
        """Such as `Intel(R) Xeon(R) Processor, 2 cores`, with accelerators if there are any."""
        chips = f", {self.accelerators} × {self.accelerator}" if self.accelerators else ""
        return f"{self.cpu}, {self.cores:g} core{'' if self.cores == 1 else 's'}{chips}"

    def to_json(self) -> dict[str, Any]:
        return {"hash": self.hash, "title": self.title, **asdict(self)}


def this_machine(devices: Sequence[Any] = ()) -> Fingerprint:
    """This machine. *Arguments:* `devices` of JAX, all of one kind. CPU devices do not count as
    accelerators."""
    chips = [d for d in devices if d.platform != "cpu"]
    commit = (
        _git("rev-parse", "HEAD") if _git("ls-files", "--error-unmatch", "__init__.py") else None
    )
    changes = None if commit is None else _git("status", "--porcelain")
    return Fingerprint(
        cpu=_cpu(),
        cores=cores().usable,
        memory_bytes=memory().total_bytes,
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        versions={name: installed(name) for name in PACKAGES},
        accelerator=chips[0].device_kind if chips else None,
        accelerators=len(chips),
        commit=commit,
        dirty=None if changes is None else bool(changes),
    )


def stated(stored: Any) -> tuple[str | None, dict[str, str]]:
    """The title and the versions of a machine read from a file, in which any part may be
    missing."""
    stored = stored if isinstance(stored, dict) else {}
    versions = {"python": stored.get("python"), **part(stored, "versions")}
    title = stored.get("title") if isinstance(stored.get("title"), str) else None
    return title, {name: version for name, version in versions.items() if isinstance(version, str)}


def _cpu() -> str:
    for line in text_in("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown"


@functools.cache  # it takes some milliseconds, and every run calls it
def _git(*arguments: str) -> str | None:
    """The output of git in chipwise's folder. `None` without git or if it fails, for example
    because chipwise is installed in another project's checkout, which does not track it."""
    command = ["git", "-C", str(_PACKAGE), *arguments]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
