import pytest

from chipwise.machine.devices_report import Environment
from chipwise.machine.host_facts import HostFacts

CHIPS = {"pci_tpu_chips": 8}
KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}
COLAB = {"COLAB_RELEASE_TAG": "release-colab_20260101", "COLAB_GPU": ""}
SLURM = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("facts", "name", "all_"),
    [
        (HostFacts(), "local", ("local",)),
        (HostFacts(environment=COLAB), "colab", ("colab",)),
        (HostFacts(environment={**COLAB, **KAGGLE}), "kaggle", ("kaggle",)),  # Kaggle's image is Colab's
        (HostFacts(paths=frozenset({"/kaggle/working", "/kaggle/input"})), "kaggle", ("kaggle",)),
        (HostFacts(paths=frozenset({"/kaggle/input"})), "local", ("local",)),  # a copy of a data folder
        (HostFacts(environment=KAGGLE, **CHIPS), "kaggle", ("kaggle", "cloud-tpu-vm")),
        (HostFacts(environment=COLAB, **CHIPS), "colab", ("colab", "cloud-tpu-vm")),
        (HostFacts(environment={**COLAB, "COLAB_TPU_ADDR": "10.0.0.2:8470"}), "colab", ("colab",)),
        (HostFacts(environment=SLURM, **CHIPS), "slurm", ("slurm", "cloud-tpu-vm")),
        (HostFacts(**CHIPS), "cloud-tpu-vm", ("cloud-tpu-vm",)),
    ],
)
def test_the_innermost_place_names_it(facts, name, all_):
    here = Environment.of(facts)
    assert (here.name, here.all) == (name, all_) and here.title


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
    assert Environment.of(HostFacts(environment=environment, pci_tpu_chips=chips)).hosts == hosts
