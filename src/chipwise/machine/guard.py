"""Prevents training on the CPU by accident.

If JAX cannot use an accelerator, it falls back to the CPU with a log line, and a job that should
take minutes takes days. The functions here find out, from facts only, whether the host has an
accelerator, why JAX does not use it, and what to do. They do not access the host.

A reason is a fact with two texts: why, and a remedy. The remedy ends without a full stop, since it
often ends with a command.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..base import DeviceError, Fact, fact
from .host_facts import HostFacts

# The oldest drivers for JAX's CUDA wheels: https://docs.jax.dev/en/latest/installation.html
OLDEST_DRIVER = {"12": (525,), "13": (580,)}


@dataclass(frozen=True)
class Accelerator:
    """An accelerator of the host: its `platform`, `"gpu"` or `"tpu"`, and the `evidence`: paths,
    names of variables, or the number of PCI cards."""

    platform: str
    evidence: tuple[str | Fact, ...]


def accelerators(facts: HostFacts) -> list[Accelerator]:
    """The host's accelerators, GPUs first.

    A device file, a PCI card or Colab's address variable proves a TPU. Of `TPU_NAME` (often
    exported on a laptop), `TPU_WORKER_ID`, a libtpu in `/lib` and a vfio group (any device of a
    virtual machine), two together do. Other TPU variables never count, since compiling for an
    absent TPU sets them.
    """
    found = []
    gpus = facts.matching(r"/dev/nvidia\d+") or facts.matching("/proc/driver/nvidia")
    if gpus:
        found.append(Accelerator("gpu", tuple(gpus)))
    proof: list[str | Fact] = [*facts.matching(r"/dev/accel\d+")]
    if facts.pci_tpu_chips:
        proof.append(fact("tpu-pci-cards", count=facts.pci_tpu_chips))
    if facts.environment.get("COLAB_TPU_ADDR"):
        proof.append("COLAB_TPU_ADDR")
    hints = [name for name in ("TPU_NAME", "TPU_WORKER_ID") if facts.environment.get(name)]
    hints += facts.matching(r"/(usr/)?lib/libtpu\.so")[:1] + facts.matching(r"/dev/vfio/\d+")[:1]
    if proof or len(hints) >= 2:
        found.append(Accelerator("tpu", (*proof, *hints)))
    return found


def cpu_on_purpose(facts: HostFacts, jax_platforms: str | None) -> Fact | None:
    """The user's setting that excludes accelerators, or `None`.

    *Arguments:* `jax_platforms`, JAX's setting of that name, which `JAX_PLATFORMS` and `simulate`
    also change.
    """
    if facts.environment.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return _variable(facts, "JAX_PLATFORMS")
    return fact("cpu-chosen") if (jax_platforms or "").split(",")[0] == "cpu" else None


def hidden(facts: HostFacts) -> Fact | None:
    """The user's setting that hides every GPU from this process, or `None`."""
    if facts.environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return _variable(facts, "CUDA_VISIBLE_DEVICES")
    if facts.environment.get("NVIDIA_VISIBLE_DEVICES") in ("void", "none"):
        return _variable(facts, "NVIDIA_VISIBLE_DEVICES")
    return None


def _variable(facts: HostFacts, name: str) -> Fact:
    return fact("environment-variable", variable=name, value=facts.environment[name])


def unused(facts: HostFacts, jax_platforms: str | None = None) -> list[Accelerator]:
    """The accelerators that JAX should use but does not, if it sees only CPUs. None if the user's
    settings exclude them."""
    if cpu_on_purpose(facts, jax_platforms):
        return []
    return [a for a in accelerators(facts) if not (a.platform == "gpu" and hidden(facts))]


def refusal(facts: HostFacts, left: list[Accelerator], errors: dict[str, str]) -> DeviceError:
    """The error for unused accelerators: the evidence, the reason and the remedy.

    *Arguments:* `left`: the unused accelerators. `errors`: platform to JAX's error message.
    """
    unused = [
        fact(
            "accelerator-unused",
            platform=accelerator.platform.upper(),
            evidence=accelerator.evidence[:3],
            reason=why_unused(facts, accelerator.platform, errors.get(accelerator.platform, "")),
        )
        for accelerator in left
    ]
    return DeviceError("cpu-fallback", unused=unused)


def why_unused(facts: HostFacts, platform: str, jax_error: str = "") -> Fact:
    """The most certain reason why JAX does not use the host's `platform` (`"gpu"` or `"tpu"`).

    *Arguments:* `jax_error`, JAX's message for that platform. It is quoted unless it says only that
    the platform is missing.
    """
    quoted = " ".join(jax_error.split())[:400].rstrip(".")
    if quoted.startswith("Unknown backend"):
        quoted = ""
    reason = _why_no_gpu if platform == "gpu" else _why_no_tpu
    return reason(facts, jax_error, quoted)


def driver_too_old(facts: HostFacts) -> Fact | None:
    """The reason if the NVIDIA driver is too old for the installed CUDA plugin. Otherwise None."""
    cuda = _cuda(facts)
    driver = facts.nvidia_driver
    if cuda is None or driver is None:
        return None
    version = tuple(int(part) for part in driver.split("."))
    if version >= OLDEST_DRIVER[cuda]:
        return None
    runs_12 = cuda == "13" and version >= OLDEST_DRIVER["12"]
    code = "driver-of-cuda-12" if runs_12 else "driver-too-old"
    return fact(code, driver=driver, cuda=cuda, oldest=OLDEST_DRIVER[cuda][0])


def plugin_mismatch(facts: HostFacts) -> Fact | None:
    """The reason if the CUDA plugin and jaxlib have different versions, so that JAX may refuse the
    plugin. Otherwise None."""
    cuda = _cuda(facts)
    jaxlib = facts.packages.get("jaxlib")
    if cuda is None or jaxlib is None:
        return None
    plugin = facts.packages[f"jax-cuda{cuda}-plugin"]
    if plugin.split(".")[:3] == jaxlib.split(".")[:3]:
        return None
    return fact("cuda-plugin-mismatch", cuda=cuda, plugin=plugin, jaxlib=jaxlib)


def _cuda(facts: HostFacts) -> str | None:
    return next(
        (cuda for cuda in OLDEST_DRIVER if f"jax-cuda{cuda}-plugin" in facts.packages), None
    )


def _why_no_gpu(facts: HostFacts, jax_error: str, quoted: str) -> Fact:
    if not facts.matching(r"/dev/nvidia\d+"):
        return fact("gpu-not-in-container")
    if _cuda(facts) is None:
        return fact("cuda-plugin-missing", jax=facts.packages.get("jax", ""))
    reason = driver_too_old(facts) or plugin_mismatch(facts)
    if reason:
        return reason
    full = re.search(r"out of memory|OUT_OF_MEMORY|no supported devices", jax_error, re.IGNORECASE)
    return fact("gpu-memory-taken" if full else "cuda-plugin-fails", said=quoted)


def _why_no_tpu(facts: HostFacts, jax_error: str, quoted: str) -> Fact:
    local = facts.matching(r"/dev/(accel|vfio/)\d+") or facts.pci_tpu_chips
    if facts.environment.get("COLAB_TPU_ADDR") and not local:
        return fact("tpu-over-network")
    if "libtpu" not in facts.packages and not facts.environment.get("TPU_LIBRARY_PATH"):
        return fact("libtpu-missing")
    if "ermission denied" in jax_error or "not permitted" in jax_error:
        return fact("tpu-not-permitted", said=quoted)
    if "in use" in jax_error or "lockfile" in jax_error:
        return fact("tpu-in-use", said=quoted)
    return fact("libtpu-fails", libtpu=facts.packages.get("libtpu", ""), said=quoted)
