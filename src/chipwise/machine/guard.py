"""Refuses to train on the CPU by accident.

JAX falls back to the CPU with a log line when it cannot use an accelerator, and a job that should take
minutes then takes days. This file decides, from facts alone, whether an accelerator is on the host, why
JAX did not take it, and what to type. Nothing here touches the host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .facts import HostFacts

OVERRIDE = "or use the CPU on purpose: --devices cpu (platform='cpu'), or JAX_PLATFORMS=cpu."

# The oldest drivers for JAX's CUDA wheels: https://docs.jax.dev/en/latest/installation.html
OLDEST_DRIVER = {"12": (525,), "13": (580,)}


@dataclass(frozen=True)
class Accelerator:
    """An accelerator that the host shows: `platform` is `"gpu"` or `"tpu"`, `evidence` what showed it."""

    platform: str
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Reason:
    """Why an accelerator is not used (`why`, a sentence) and what mends it (`fix`, which has no full stop:
    it often ends in a command, to be copied)."""

    why: str
    fix: str


def accelerators(facts: HostFacts) -> list[Accelerator]:
    """What the host shows, GPUs first.

    A TPU is certain when its device file, its PCI card or Colab's address variable is there. `TPU_NAME`
    (often exported on a laptop), `TPU_WORKER_ID`, a libtpu in `/lib` and a vfio group (any device lent to
    a virtual machine) prove nothing alone: two of them together do. Other TPU variables never count,
    since compiling for an absent TPU sets them.
    """
    found = []
    gpus = facts.matching(r"/dev/nvidia\d+") or facts.matching("/proc/driver/nvidia")
    if gpus:
        found.append(Accelerator("gpu", tuple(gpus)))
    sure = facts.matching(r"/dev/accel\d+")
    if facts.pci_tpu_chips:
        sure.append(f"{facts.pci_tpu_chips} TPU chips on the PCI bus")
    if facts.environment.get("COLAB_TPU_ADDR"):
        sure.append("COLAB_TPU_ADDR")
    hints = [name for name in ("TPU_NAME", "TPU_WORKER_ID") if facts.environment.get(name)]
    hints += facts.matching(r"/(usr/)?lib/libtpu\.so")[:1] + facts.matching(r"/dev/vfio/\d+")[:1]
    if sure or len(hints) >= 2:
        found.append(Accelerator("tpu", tuple(sure + hints)))
    return found


def cpu_on_purpose(facts: HostFacts, jax_platforms: str | None) -> str | None:
    """The user's own setting that keeps accelerators out, in words, or `None`.

    `jax_platforms` is JAX's setting of that name, which `JAX_PLATFORMS` and `simulate` also set.
    """
    if facts.environment.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return f"JAX_PLATFORMS={facts.environment['JAX_PLATFORMS']} in the environment"
    if (jax_platforms or "").split(",")[0] == "cpu":
        return "the CPU was asked for (--devices cpu, --simulate, or JAX's setting jax_platforms)"
    return None


def hidden(facts: HostFacts) -> str | None:
    """The setting that hides every GPU from this process on purpose, in words, or `None`."""
    environment = facts.environment
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']!r} in the environment"
    if environment.get("NVIDIA_VISIBLE_DEVICES") in ("void", "none"):
        return f"NVIDIA_VISIBLE_DEVICES={environment['NVIDIA_VISIBLE_DEVICES']} in the environment"
    return None


def unused(facts: HostFacts, jax_platforms: str | None = None) -> list[Accelerator]:
    """Accelerators that JAX should have taken and did not, when it found only CPUs; empty when the
    user's own settings kept them out."""
    if cpu_on_purpose(facts, jax_platforms):
        return []
    return [a for a in accelerators(facts) if not (a.platform == "gpu" and hidden(facts))]


def why_unused(facts: HostFacts, platform: str, jax_error: str = "") -> Reason:
    """Why JAX does not use the host's `platform` (`"gpu"` or `"tpu"`), the surest cause first.

    `jax_error` is what JAX said when asked for that platform; it is quoted when it says more than
    that the platform is missing.
    """
    return _why_no_gpu(facts, jax_error) if platform == "gpu" else _why_no_tpu(facts, jax_error)


def explain(facts: HostFacts, unused: list[Accelerator], errors: dict[str, str]) -> str:
    """The whole message for accelerators left unused: what is there, why, what to type.

    `errors` maps a platform to what JAX said about it.
    """
    parts = []
    for accelerator in unused:
        reason = why_unused(facts, accelerator.platform, errors.get(accelerator.platform, ""))
        evidence = ", ".join(accelerator.evidence[:3])
        parts.append(
            f"this host has a {accelerator.platform.upper()} ({evidence}) but JAX found only the CPU: "
            f"{reason.why} {reason.fix}"
        )
    return "; ".join([*parts, OVERRIDE])


def driver_too_old(facts: HostFacts) -> Reason | None:
    """The reason when the NVIDIA driver is older than the installed CUDA plugin needs."""
    cuda = _cuda(facts)
    if cuda is None or facts.nvidia_driver is None:
        return None
    version = tuple(int(part) for part in facts.nvidia_driver.split("."))
    if version >= OLDEST_DRIVER[cuda]:
        return None
    oldest = OLDEST_DRIVER[cuda][0]
    why = (
        f"the NVIDIA driver {facts.nvidia_driver} is too old for CUDA {cuda}, which needs {oldest} or newer."
    )
    if cuda == "13" and version >= OLDEST_DRIVER["12"]:
        return Reason(
            why,
            "This driver runs CUDA 12: pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt && "
            'pip install "chipwise[cuda]"',
        )
    return Reason(
        why, f"Update the driver to {oldest} or newer and restart (on a cloud machine, choose a newer image)"
    )


def plugin_mismatch(facts: HostFacts) -> Reason | None:
    """The reason when the CUDA plugin and jaxlib are of different releases: JAX may refuse the plugin."""
    cuda, jaxlib = _cuda(facts), facts.packages.get("jaxlib")
    if cuda is None or jaxlib is None:
        return None
    plugin = facts.packages[f"jax-cuda{cuda}-plugin"]
    if plugin.split(".")[:3] == jaxlib.split(".")[:3]:
        return None
    return Reason(
        f"jax-cuda{cuda}-plugin {plugin} does not belong to jaxlib {jaxlib}.",
        f'Install matching ones: pip install --upgrade "jax[cuda{cuda}]"',
    )


def _cuda(facts: HostFacts) -> str | None:
    for cuda in OLDEST_DRIVER:
        if f"jax-cuda{cuda}-plugin" in facts.packages:
            return cuda
    return None


def _why_no_gpu(facts: HostFacts, jax_error: str) -> Reason:
    if not facts.matching(r"/dev/nvidia\d+"):
        return Reason(
            "the driver is loaded, but no /dev/nvidia0 reaches this container or job.",
            "Start the container with docker run --gpus all, or ask the scheduler for one (sbatch --gpus 1)",
        )
    if _cuda(facts) is None:
        return Reason(
            f"JAX {facts.packages.get('jax', '')} is installed without its CUDA plugin.".replace("  ", " "),
            'Install it: pip install "chipwise[cuda]"',
        )
    known = driver_too_old(facts) or plugin_mismatch(facts)
    if known:
        return known
    said = _said(jax_error)
    if re.search(r"out of memory|OUT_OF_MEMORY|no supported devices", jax_error, re.IGNORECASE):
        return Reason(
            f"its memory may be taken by another process.{said}", "Look with nvidia-smi and end that process"
        )
    return Reason(
        f"the CUDA plugin is installed but does not start.{said}",
        "Check that nvidia-smi works here, then reinstall: "
        'pip install --upgrade --force-reinstall "chipwise[cuda]"',
    )


def _why_no_tpu(facts: HostFacts, jax_error: str) -> Reason:
    here = facts.matching(r"/dev/(accel|vfio/)\d+") or facts.pci_tpu_chips
    if facts.environment.get("COLAB_TPU_ADDR") and not here:
        return Reason(
            "this runtime reaches its TPU over the network (COLAB_TPU_ADDR), which JAX no longer supports.",
            "Choose a TPU VM instead: in Colab, Runtime > Change runtime type > v5e-1 TPU",
        )
    if "libtpu" not in facts.packages and not facts.environment.get("TPU_LIBRARY_PATH"):
        return Reason(
            "the TPU's driver library, libtpu, is not installed as a Python package.",
            'Install it: pip install "chipwise[tpu]"',
        )
    said = _said(jax_error)
    named = re.search(r"in use by process with pid (\d+)", jax_error)
    if facts.tpu_holders:
        holder = facts.tpu_holders[0]
        return Reason(
            f"process {holder.pid} ({holder.name}) holds {holder.path}, and a TPU serves one process at a "
            "time.",
            f"End it (kill {holder.pid}; in a notebook, restart the other kernel) and try again",
        )
    if named:
        return Reason(
            f"process {named[1]} holds it, and a TPU serves one process at a time.",
            f"End it (kill {named[1]}; in a notebook, restart the other kernel) and try again",
        )
    if "lockfile" in jax_error or ("in use" in jax_error and "/tmp/libtpu_lockfile" in facts.paths):
        return Reason(
            f"a lock file says that the TPU is taken, but no process that we may see holds it.{said}",
            "Look with sudo lsof -w /dev/accel* /dev/vfio/*; if nothing shows: sudo rm /tmp/libtpu_lockfile",
        )
    if "ermission denied" in jax_error or "not permitted" in jax_error:
        return Reason(
            f"this user or container may not open the TPU's device file.{said}",
            "Run the container with --privileged, or join the group that owns /dev/accel* or /dev/vfio",
        )
    if "in use" in jax_error:
        return Reason(
            f"another process holds it, and a TPU serves one process at a time.{said}",
            "Find it with sudo lsof -w /dev/accel* /dev/vfio/* and end it",
        )
    return Reason(
        f"libtpu {facts.packages.get('libtpu', '')} is installed but does not start.{said}".replace(
            "  ", " "
        ),
        'Reinstall it for this JAX: pip install --upgrade "chipwise[tpu]"; then restart the runtime',
    )


def _said(jax_error: str) -> str:
    text = " ".join(jax_error.split())
    if not text or text.startswith("Unknown backend"):
        return ""
    return f" JAX says: {text[:400].rstrip('.')}."
