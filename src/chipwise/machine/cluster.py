"""The number of this host and of all hosts, from the environment in which it was started.

JAX reads the variables of SLURM, Open MPI and Cloud TPUs. This module reads those of SkyPilot and
`chipwise --processes`. Kaggle, Colab and a single TPU VM are one host. If a machine runs several
tasks, each takes its share of the GPUs, while JAX would give each task one GPU (jax issues 16788
and 23452).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..base import DeviceError, Fact, fact

PORT = 8482  # JAX's default
TOLD = ("CHIPWISE_HOSTS", "CHIPWISE_HOST", "CHIPWISE_COORDINATOR")
"""The variables for `--hosts N --host I --coordinator ADDRESS`."""
TOKEN = "CHIPWISE_TOKEN"  # the same on all hosts, and known to nobody else
THREADS = 4096
_OF_JAX = ("slurm", "ompi", "gketpu", "gcetpu")
_ONE_HOST = ("KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG")


@dataclass(frozen=True)
class Seat:
    """Host `index` of `count`. All hosts meet at `address:port` of host 0."""

    index: int
    count: int
    address: str
    port: int = PORT
    place: str = "given"  # the source of these numbers
    gpus: tuple[int, ...] | None = None  # its GPUs, by position among the visible. None: all


def given(count: int | None, index: int | None, coordinator: str | None) -> Seat | None:
    """The seat that options define. `None` without options.

    Raises `DeviceError` if some options are missing, or for impossible numbers.
    """
    options = {"hosts": count, "host": index, "coordinator": coordinator}
    if count is None and index is None and coordinator is None:
        return None
    if count == 1 and not index:
        return Seat(0, 1, "localhost")
    missing = [f"--{name}" for name, value in options.items() if value is None]
    if missing or count is None or index is None or coordinator is None:
        raise DeviceError("hosts-half-told", missing=missing)
    if count < 1 or not 0 <= index < count:
        raise DeviceError("host-beyond-hosts", hosts=count, host=index)
    address, colon, port = coordinator.rpartition(":")
    if not colon or (":" in address and not address.startswith("[")):
        address = coordinator
        port = str(PORT)
    address = address.strip("[]")
    try:
        address.encode("idna")  # as a socket does
        readable = port.isdecimal() and 0 < int(port) < 65536 and address
    except UnicodeError:
        readable = False
    if not readable:
        raise DeviceError("coordinator-unreadable", coordinator=coordinator, port=PORT)
    return Seat(index, count, address, int(port))


def found(environment: Mapping[str, str], visible_gpus: int) -> Seat | None:
    """The seat that `environment` (`os.environ`) defines. `None` for a single host.

    *Arguments:* `visible_gpus`: the number of GPUs that this process sees. Raises `DeviceError` for
    impossible numbers.
    """
    if any(name in environment for name in TOLD):
        count, index = (_whole(environment, name) for name in TOLD[:2])
        return given(count, index, environment.get(TOLD[2]))
    if any(environment.get(name) for name in _ONE_HOST):
        return None
    if "SKYPILOT_NODE_RANK" in environment:
        count, index = (
            _whole(environment, f"SKYPILOT_{name}") for name in ("NUM_NODES", "NODE_RANK")
        )
        addresses = environment.get("SKYPILOT_NODE_IPS", "").split()
        if count in (None, 1):
            return None
        seat = given(count, index, addresses[0] if addresses else None)
        return seat and replace(seat, place="SkyPilot")
    try:
        return _of_jax(environment, visible_gpus)
    except (LookupError, ValueError) as error:  # of JAX's readers, which take what they find
        raise DeviceError("cluster-unreadable", reason=repr(error)) from error


def check_threads(environment: Mapping[str, str]) -> None:
    """Raises `DeviceError` for a size of XLA's thread pool that no machine can start."""
    given = environment.get("NPROC", "1")
    if not re.fullmatch("[0-9]{1,4}", given) or not 0 < int(given) <= THREADS:
        raise DeviceError("variable-not-threads", value=given, most=THREADS)


def _whole(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name)
    if value is None:
        return None
    if not value.isdecimal():
        raise DeviceError("variable-not-whole", variable=name, value=value)
    return int(value)


def _of_jax(environment: Mapping[str, str], visible_gpus: int) -> Seat | None:
    """The seat from JAX's readers of SLURM, Open MPI and Cloud TPUs, which use this process's
    environment."""
    from jax._src.clusters import ClusterEnv

    for cluster in ClusterEnv._cluster_types:
        if cluster.name not in _OF_JAX or not cluster.is_env_present():
            continue
        count = cluster.get_process_count()
        if count == 1:
            return None
        port = environment.get("JAX_COORDINATOR_PORT")
        coordinator = cluster.get_coordinator_address(
            timeout_secs=300, override_coordinator_port=port
        )
        tasks = _tasks_here(environment)
        task = cluster.get_local_process_id()
        gpus = None
        bounds = ("GPUS_PER_TASK", "TRES_PER_TASK", "NTASKS_PER_GPU", "GPU_BIND")
        # Whether SLURM has limited this task to GPUs of its own
        own = any(environment.get(f"SLURM_{name}") not in (None, "", "none") for name in bounds)
        if tasks > 1 and task is not None and visible_gpus and not own:
            if visible_gpus < tasks:
                raise DeviceError("gpus-below-tasks", gpus=visible_gpus, tasks=tasks)
            share = visible_gpus // tasks
            gpus = tuple(range(task * share, (task + 1) * share))
        seat = given(count, cluster.get_process_id(), coordinator)
        return seat and replace(seat, place=cluster.name, gpus=gpus)
    return None


def outside_srun(environment: Mapping[str, str]) -> Fact | None:
    """A warning if a SLURM job has several tasks, but `srun` did not start this process. Otherwise
    None."""
    tasks = environment.get("SLURM_NTASKS", "1")
    inside = "SLURM_STEP_ID" in environment or "SLURM_STEP_NUM_TASKS" in environment
    if "SLURM_JOB_ID" not in environment or inside or not tasks.isdecimal() or int(tasks) < 2:
        return None
    return fact("slurm-outside-srun", tasks=int(tasks))


def _tasks_here(environment: Mapping[str, str]) -> int:
    """The number of this run's processes on this machine."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environment:
        return _whole(environment, "OMPI_COMM_WORLD_LOCAL_SIZE") or 1
    text = (
        environment.get("SLURM_STEP_TASKS_PER_NODE")
        or environment.get("SLURM_TASKS_PER_NODE")
        or "1"
    )
    tasks: list[int] = []  # by node: "2(x3),1" is 2, 2, 2, 1
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(number)] * int(times or 1)
    node = environment.get("SLURM_NODEID", "0")
    return tasks[int(node)] if node.isdecimal() and int(node) < len(tasks) else 1
