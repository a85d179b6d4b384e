"""Which host of how many, as recorded environments of the places say."""

import pytest

import chipwise as cw
import tasks
from chipwise.base.errors import DeviceError
from chipwise.machine.cluster import PORT, Seat, found, given, outside_srun
from chipwise.run.placement import lay_out
from refusals import refused

SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NODELIST": "node[07-08],gpu3",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
OMPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
}
TOLD = {"CHIPWISE_HOSTS": "3", "CHIPWISE_HOST": "2", "CHIPWISE_COORDINATOR": "10.0.0.1:7000"}


def seat(monkeypatch, environment, gpus=0):
    for name, value in environment.items():  # JAX's own readers look there
        monkeypatch.setenv(name, value)
    return found(environment, gpus)


def test_slurm_gives_each_task_its_share_of_the_gpus(monkeypatch):
    here = seat(monkeypatch, SLURM, gpus=8)
    assert (here.index, here.count, here.address, here.place) == (3, 4, "node07", "slurm")
    assert here.gpus == (4, 5, 6, 7)


def test_slurm_with_one_task_a_node_or_bound_gpus_takes_all_it_sees(monkeypatch):
    assert seat(monkeypatch, {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, gpus=8).gpus is None
    assert seat(monkeypatch, {**SLURM, "SLURM_GPUS_PER_TASK": "2"}, gpus=2).gpus is None
    assert seat(monkeypatch, SLURM, gpus=0).gpus is None


def test_more_tasks_than_gpus_are_refused(monkeypatch):
    with refused(DeviceError, "gpus-below-tasks", gpus=1, tasks=2):
        seat(monkeypatch, SLURM, gpus=1)


def test_open_mpi(monkeypatch):
    here = seat(monkeypatch, OMPI, gpus=2)
    assert (here.index, here.count, here.address, here.gpus) == (1, 2, "10.96.0.1", (1,))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (SKYPILOT, Seat(1, 2, "10.0.0.4", PORT, "SkyPilot")),
        ({**SKYPILOT, "SKYPILOT_NUM_NODES": "1"}, None),
        (TOLD, Seat(2, 3, "10.0.0.1", 7000)),
        ({**SKYPILOT, **TOLD}, Seat(2, 3, "10.0.0.1", 7000)),
        ({**SKYPILOT, "CHIPWISE_HOSTS": "1"}, Seat(0, 1, "localhost")),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "TPU_WORKER_HOSTNAMES": "a,b"}, None),
        ({"COLAB_RELEASE_TAG": "release-colab_20260101"}, None),
        ({"SLURM_JOB_ID": "4242", "SLURM_NTASKS": "4"}, None),  # a batch script, not a step
    ],
)
def test_places(environment, expected):
    assert found(environment, 0) == expected


@pytest.mark.parametrize(
    ("words", "code", "facts"),
    [
        ((2, None, "a"), "hosts-half-told", {"missing": ["--host"]}),
        ((None, 1, None), "hosts-half-told", {"missing": ["--hosts", "--coordinator"]}),
        ((2, 2, "a"), "host-beyond-hosts", {"hosts": 2, "host": 2}),
        ((2, 1, "a:x"), "coordinator-unreadable", {"coordinator": "a:x"}),
        ((2, 1, "a:70000"), "coordinator-unreadable", {"coordinator": "a:70000"}),
    ],
)
def test_what_cannot_be(words, code, facts):
    with refused(DeviceError, code, **facts):
        given(*words)


def test_addresses():
    assert given(None, None, None) is None
    assert (given(2, 1, "a").port, given(2, 1, "a:1").port) == (PORT, 1)
    assert (given(2, 1, "[fd00::1]:9").address, given(2, 1, "fd00::1").address) == ("fd00::1", "fd00::1")


def test_a_number_that_is_none():
    with refused(DeviceError, "variable-not-whole", variable="CHIPWISE_HOST", value="two"):
        found({**TOLD, "CHIPWISE_HOST": "two"}, 0)


@pytest.mark.parametrize(
    "environment",
    [
        {"OMPI_MCA_orte_hnp_uri": "x"},
        {**OMPI, "OMPI_COMM_WORLD_SIZE": ""},
        {**OMPI, "OMPI_COMM_WORLD_RANK": "x"},
        {**OMPI, "OMPI_MCA_orte_hnp_uri": "x"},
    ],
)
def test_variables_of_open_mpi_that_jax_cannot_read(environment, monkeypatch):
    with refused(DeviceError, "cluster-unreadable"):
        seat(monkeypatch, environment)


def test_numbers_of_a_cluster_that_cannot_be(monkeypatch):
    with refused(DeviceError, "cluster-unreadable"):
        seat(monkeypatch, {**SLURM, "SLURM_JOB_ID": "x"})
    with refused(DeviceError, "host-beyond-hosts", hosts=4, host=4):
        seat(monkeypatch, {**SLURM, "SLURM_PROCID": "4"})
    with refused(DeviceError, "variable-not-whole", variable="OMPI_COMM_WORLD_LOCAL_SIZE"):
        seat(monkeypatch, {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "-1"})


@pytest.mark.parametrize(
    "environment, number",
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, 2),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "many"}, None),
        ({"SLURM_NTASKS": "8"}, None),  # left over from another job
    ],
)
def test_tasks_that_nobody_started_are_named(environment, number):
    told = outside_srun(environment)
    assert (told and told["tasks"]) == number


def test_training_says_so(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    _, _, warnings = lay_out(tasks.recipe(), cw.On(devices=1))
    assert [warning.code for warning in warnings] == ["slurm-outside-srun"]


@pytest.mark.parametrize("address", ["node1..cluster:8482", ".node1:8482", "x" * 64 + ".net"])
def test_an_address_that_no_socket_takes(address):
    with refused(DeviceError, "coordinator-unreadable", coordinator=address):
        given(2, 1, address)
