"""Where this process runs, and how many hosts it was told to be one of.

Several places can hold at once, so they have an order: the innermost, whose limits bind, names the
place. Kaggle before Colab, because Kaggle's image is built on Colab's and carries its variables
(https://github.com/Kaggle/docker-python/pull/1444, https://github.com/Kaggle/kagglehub/pull/230); both
before SLURM and Cloud TPU VM, because notebooks run on machines that are one; SLURM before Cloud TPU VM,
because the scheduler's share is smaller than the machine; and `local` when nothing else holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from . import guard
from .facts import HostFacts

NAMES = {
    "kaggle": "Kaggle notebook",
    "colab": "Google Colab",
    "slurm": "SLURM job",
    "cloud-tpu-vm": "Cloud TPU VM",
    "local": "local machine",
}


@dataclass(frozen=True)
class Place:
    """Where we run: `name` is a key of `NAMES`, `all` every one that holds, in order.

    `hosts` is how many hosts (or SLURM tasks) the environment declares to be working together, at least 1.
    """

    name: str
    all: tuple[str, ...]
    hosts: int

    @property
    def title(self) -> str:
        return NAMES[self.name]


def place(facts: HostFacts) -> Place:
    """The place that a host's facts describe."""
    environment, holds = facts.environment, []
    if any(
        environment.get(k) for k in ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_DATA_PROXY_TOKEN", "KAGGLE_URL_BASE")
    ) or {
        "/kaggle/working",
        "/kaggle/input",
    } <= set(facts.paths):
        holds.append("kaggle")
    elif any(
        environment.get(k)
        for k in ("COLAB_RELEASE_TAG", "COLAB_BACKEND_VERSION", "COLAB_GPU", "COLAB_TPU_ADDR")
    ):
        holds.append("colab")
    if environment.get("SLURM_JOB_ID"):
        holds.append("slurm")
    if any(a.platform == "tpu" and a.evidence != ("COLAB_TPU_ADDR",) for a in guard.accelerators(facts)):
        holds.append("cloud-tpu-vm")
    holds = holds or ["local"]
    return Place(holds[0], tuple(holds), _hosts(holds, facts))


def _hosts(holds: list[str], facts: HostFacts) -> int:
    """How many hosts are declared. One on Kaggle and Colab whatever the variables say: Kaggle sets
    `TPU_PROCESS_ADDRESSES` and other marks of a pod for its single v5e-8 host, and a program that believes
    them waits for hosts that do not exist."""
    if "kaggle" in holds or "colab" in holds:
        return 1
    environment = facts.environment
    declared = [1]
    if "slurm" in holds:
        # SLURM_STEP_* exist inside srun only: a bare sbatch script runs once, whatever it may start.
        declared.append(_number(environment.get("SLURM_STEP_NUM_TASKS")))
    declared.append(_number(environment.get("JAX_NUM_PROCESSES")))
    for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"):
        names = re.split(r"[,\s]+", environment.get(name, "").strip())
        declared.append(len({n for n in names if n and n not in ("local", "localhost", "127.0.0.1")}))
    return max(declared)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 1
