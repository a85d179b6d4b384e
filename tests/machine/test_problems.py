import dataclasses

import pytest

from chipwise.machine.facts import HostFacts
from chipwise.machine.hosts import place
from chipwise.machine.limits import Cores, Disk, Memory
from chipwise.machine.problems import GiB, Situation, problems

JAX = {"jax": "0.10.2", "jaxlib": "0.10.2"}
GPU = frozenset({"/dev/nvidia0"})


def found(facts=None, **changes):
    facts = facts or HostFacts(packages=JAX)
    roomy = Situation(
        facts=facts,
        place=place(facts),
        cores=Cores(16, 16.0),
        memory=Memory(64 * GiB, 60 * GiB),
        disk=Disk("/data", 500 * GiB, 400 * GiB),
        platform="cpu",
        kinds=("cpu",),
    )
    return problems(dataclasses.replace(roomy, **changes))


def one(facts=None, **changes):
    (problem,) = found(facts, **changes)
    assert problem.what and problem.why and problem.fix
    return problem


def test_a_good_host_has_none():
    assert found() == []
    gpus = HostFacts(paths=GPU, packages={**JAX, "jax-cuda12-plugin": "0.10.2"}, nvidia_driver="580.65.06")
    assert found(gpus, platform="gpu", kinds=("NVIDIA L4",) * 8) == []


def test_a_fall_to_the_cpu_is_an_error():
    problem = one(HostFacts(paths=GPU, packages=JAX))
    assert problem.severity == "error" and "fell back to the CPU" in problem.what
    assert "chipwise[cuda]" in problem.fix and "--devices cpu" in problem.fix


@pytest.mark.parametrize(
    ("facts", "changes", "severity", "words"),
    [
        (HostFacts(environment={"JAX_PLATFORMS": "cpu"}, paths=GPU), {}, "warning", "JAX_PLATFORMS=cpu"),
        (HostFacts(paths=GPU), {"jax_platforms": "cpu"}, "warning", "--simulate"),
        (
            HostFacts(environment={"CUDA_VISIBLE_DEVICES": "-1"}, paths=GPU),
            {},
            "warning",
            "CUDA_VISIBLE_DEVICES",
        ),
        (None, {"float64": True}, "warning", "JAX_ENABLE_X64"),
        (None, {"disk": Disk("/data", 9 * GiB, GiB)}, "warning", "/data"),
        (None, {"memory": Memory(12 * GiB, GiB)}, "warning", "memory"),
        (None, {"cores": Cores(96, 0.5), "kinds": ("cpu",) * 1}, "note", "0.5 host core"),
        (None, {"cores": Cores(2, 2.0), "kinds": ("cpu",) * 8}, "note", "take turns"),
        (
            None,
            {"platform": "gpu", "kinds": ("NVIDIA L4",) * 2, "cores": Cores(2, 2.0)},
            "warning",
            "2 host cores",
        ),
        (None, {"platform": "gpu", "kinds": ("Tesla T4", "NVIDIA L4")}, "warning", "slowest"),
        (None, {"broken": {0: "XlaRuntimeError: INTERNAL: bad"}}, "error", "INTERNAL: bad"),
        (
            None,
            {"platform": None, "kinds": (), "jax_errors": {"": "bogus backend"}},
            "error",
            "bogus backend",
        ),
        (
            HostFacts(paths=GPU, packages=JAX),
            {"platform": None, "kinds": ()},
            "error",
            "chipwise[cuda]",
        ),
        (
            HostFacts(
                environment={"KAGGLE_KERNEL_RUN_TYPE": "Batch"},
                packages={**JAX, "tensorflow": "2.18"},
                pci_tpu_chips=8,
            ),
            {"platform": "tpu", "kinds": ("TPU v5 lite",) * 8},
            "warning",
            "pip uninstall -y tensorflow && pip install tensorflow-cpu",
        ),
        (
            HostFacts(environment={"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "4"}),
            {},
            "warning",
            "jax.distributed.initialize()",
        ),
        (
            HostFacts(paths=GPU, packages={**JAX, "jax-cuda12-plugin": "0.10.2"}, nvidia_driver="470.82.01"),
            {"platform": "gpu", "kinds": ("Tesla T4",)},
            "warning",
            "Update the driver to 525",
        ),
    ],
)
def test_each_problem_alone(facts, changes, severity, words):
    problem = one(facts, **changes)
    assert problem.severity == severity
    assert words in f"{problem.what} {problem.why} {problem.fix}"


def test_tensorflow_for_the_cpu_only_is_no_problem():
    facts = HostFacts(packages={**JAX, "tensorflow-cpu": "2.18"}, pci_tpu_chips=8)
    assert found(facts, platform="tpu", kinds=("TPU v5 lite",) * 8) == []


def test_errors_come_first():
    severities = [p.severity for p in found(broken={1: "x"}, float64=True, kinds=("cpu",) * 32)]
    assert severities == ["error", "warning", "note"]
