import pytest

from chipwise.machine.devices_report import declared_hosts
from chipwise.machine.host_facts import HostFacts

KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}
COLAB = {"COLAB_RELEASE_TAG": "release-colab_20260101", "COLAB_GPU": ""}
SLURM = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environment", "chips", "hosts"),
    [
        ({}, 0, 1),
        # Kaggle's v5e-8 is one host, whatever it says
        ({**KAGGLE, "TPU_PROCESS_ADDRESSES": "local", "TPU_WORKER_HOSTNAMES": "a,b,c,d"}, 8, 1),
        ({**COLAB, "TPU_WORKER_HOSTNAMES": "a,b"}, 1, 1),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, 4, 1),
        ({"TPU_WORKER_HOSTNAMES": "t1v-n-0", "TPU_WORKER_ID": "0"}, 4, 1),
        ({"TPU_WORKER_HOSTNAMES": "t1v-n-0,t1v-n-1", "TPU_WORKER_ID": "1"}, 4, 2),
        ({"TPU_PROCESS_ADDRESSES": "10.0.0.1:8476,10.0.0.2:8476"}, 4, 2),
        ({"JAX_NUM_PROCESSES": "3"}, 0, 3),
        (SLURM, 0, 1),  # a batch script runs once
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "4"}, 0, 4),  # srun starts four
        ({**SLURM, "SLURM_STEP_NUM_TASKS": ""}, 0, 1),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "²"}, 0, 1),
    ],
)
def test_declared_hosts(environment, chips, hosts):
    assert declared_hosts(HostFacts(environment=environment, pci_tpu_chips=chips)) == hosts
