"""The names of chips at each place. A table lists only the chips that the place has.

SkyPilot's names are those of its catalogue (`sky show-gpus`). Google's types and runtime versions:
https://cloud.google.com/tpu/docs/runtimes; SkyPilot's own default runtime for v5litepod is that of v5p.
GKE's labels: https://cloud.google.com/kubernetes-engine/docs/concepts/tpus and .../docs/concepts/gpus.
"""

from __future__ import annotations

from ..chips.targets import Target

SKYPILOT_GPUS = {
    "p100": "P100", "p100-sxm2": "P100", "v100": "V100", "v100-pcie": "V100",
    "v100-32gb": "V100-32GB", "t4": "T4", "rtx-3090": "RTX3090", "rtx-4090": "RTX4090", "a10g": "A10G",
    "l4": "L4", "a100": "A100", "a100-80gb": "A100-80GB", "a100-pcie": "A100-80GB", "l40s": "L40S",
    "h100": "H100", "h100-pcie": "H100", "h200": "H200", "b200": "B200", "gb200": "GB200",
}  # fmt: skip
GKE_GPUS = {
    "p100-sxm2": "nvidia-tesla-p100", "p100": "nvidia-tesla-p100", "v100": "nvidia-tesla-v100",
    "t4": "nvidia-tesla-t4", "l4": "nvidia-l4", "a100": "nvidia-tesla-a100", "a100-80gb": "nvidia-a100-80gb",
    "h100": "nvidia-h100-80gb", "h200": "nvidia-h200-141gb", "b200": "nvidia-b200", "gb200": "nvidia-gb200",
}  # fmt: skip
GKE_TPUS = {
    "v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}  # fmt: skip
RUNTIMES = {
    "v2": "tpu-ubuntu2204-base", "v3": "tpu-ubuntu2204-base", "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e",
}  # fmt: skip
"""Software of a TPU VM. TPU7x is rented through GKE alone."""

ZONES = {
    "v2": "us-central1-b", "v3": "europe-west4-a", "v4": "us-central2-b", "v5e": "us-west4-a",
    "v5p": "us-east5-a", "v6e": "us-east5-b",
}  # fmt: skip
"""A zone that has the version (https://cloud.google.com/tpu/docs/regions-zones): not the cheapest."""

NOTEBOOKS = {"kaggle": ("v5e-8", "t4:2", "p100"), "colab": ("v5e-1", "t4", "l4", "a100", "v6e-1")}
"""What the two lend: https://www.kaggle.com/docs/notebooks, https://research.google.com/colaboratory/faq.html."""


def short(target: Target) -> str:
    return target.chip.names[0]


def gpu(target: Target) -> bool:
    """Whether the target has GPUs that JAX's CUDA version supports; its drivers do not support a K80."""
    return target.chip.kind == "GPU" and float(target.chip.compute_capability or 0) >= 6


def slice_size(target: Target) -> str:
    """The number in a slice's name."""
    return target.name.rpartition("-")[2]


def google_type(target: Target) -> str | None:
    """Google's accelerator type of a TPU slice, such as `v5litepod-8`."""
    if target.chip.kind != "TPU" or target.rented_as or short(target) not in RUNTIMES:
        return None
    version = "v5litepod" if short(target) == "v5e" else short(target)
    return f"{version}-{slice_size(target)}"


def skypilot(target: Target) -> str | None:
    """SkyPilot's name, with the number on one host, such as `A100-80GB:8` or `tpu-v5litepod-8`."""
    if target.chip.kind == "TPU":
        google = google_type(target)
        return google and f"tpu-{google}"
    name = SKYPILOT_GPUS.get(short(target))
    return name and f"{name}:{target.chips // target.hosts}"


def gke(target: Target) -> tuple[dict[str, str], str, int] | None:
    """Node labels, the resource, and its count on one host."""
    a_host = target.chips // target.hosts
    if short(target) in GKE_GPUS:
        label = {"cloud.google.com/gke-accelerator": GKE_GPUS[short(target)]}
        return label, "nvidia.com/gpu", a_host
    if target.chip.kind != "TPU" or target.topology is None or target.rented_as:
        return None
    name = GKE_TPUS.get(short(target))
    if name is None:
        return None
    topology = target.topology.partition(":")[2]
    labels = {
        "cloud.google.com/gke-tpu-accelerator": name,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    return labels, "google.com/tpu", a_host
