"""The report of `chipwise devices`: of this host, and of hosts described as values."""

import dataclasses
import json

import pytest

from chipwise.base.facts import fact
from chipwise.machine.devices_report import DeviceLine, DevicesReport, GiB, look
from chipwise.machine.host_facts import HostFacts, gather
from chipwise.machine.limits import Cores, HostMemory

JAX = {"jax": "0.10.2", "jaxlib": "0.10.2"}
CUDA = {**JAX, "jax-cuda12-plugin": "0.10.2"}
GPU = frozenset({"/dev/nvidia0"})


def kinds(*names):
    platform = "cpu" if names[0] == "cpu" else "tpu" if names[0].startswith("TPU") else "gpu"
    return tuple(DeviceLine(i, platform, name) for i, name in enumerate(names))


def listed(facts=None, **changes):
    """The problems of a roomy host with one CPU device, but for `changes`."""
    facts = facts or HostFacts(packages=JAX)
    roomy = DevicesReport(
        facts=facts,
        cores=Cores(16, 16.0),
        memory=HostMemory(64 * GiB, 60 * GiB),
        devices=kinds("cpu"),
    )
    return dataclasses.replace(roomy, **changes).problems


def test_a_good_host_has_none():
    assert listed() == []
    gpus = HostFacts(paths=GPU, packages=CUDA, nvidia_driver="580.65.06")
    assert listed(gpus, devices=kinds(*["NVIDIA L4"] * 8)) == []


OLD = HostFacts(paths=GPU, packages=CUDA, nvidia_driver="470.82.01")
BROKEN = (DeviceLine(0, "cpu", "cpu", error="XlaRuntimeError: INTERNAL: bad"),)


@pytest.mark.parametrize(
    ("facts", "changes", "severity", "code", "numbers"),
    [
        (HostFacts(paths=GPU, packages=JAX), {}, "error", "fell-back-to-cpu", {"platform": "GPU"}),
        (
            HostFacts(environment={"JAX_PLATFORMS": "cpu"}, paths=GPU),
            {},
            "warning",
            "accelerator-left-alone",
            {"setting": fact("environment-variable", variable="JAX_PLATFORMS", value="cpu")},
        ),
        (
            HostFacts(paths=GPU),
            {"jax_platforms": "cpu"},
            "warning",
            "accelerator-left-alone",
            {"accelerators": ["GPU"], "setting": fact("cpu-chosen")},
        ),
        (
            HostFacts(environment={"CUDA_VISIBLE_DEVICES": "-1"}, paths=GPU),
            {},
            "warning",
            "gpu-hidden",
            {"setting": fact("environment-variable", variable="CUDA_VISIBLE_DEVICES", value="-1")},
        ),
        (None, {"float64": True}, "warning", "float64-enabled", {}),
        (None, {"memory": HostMemory(12 * GiB, GiB)}, "warning", "memory-low", {"gib": 1}),
        (None, {"cores": Cores(96, 0.5)}, "note", "devices-take-turns", {"cores": 0.5, "devices": 1}),
        (
            None,
            {"cores": Cores(2, 2.0), "devices": kinds(*["cpu"] * 8)},
            "note",
            "devices-take-turns",
            {"cores": 2, "devices": 8},
        ),
        (
            None,
            {"devices": kinds(*["NVIDIA L4"] * 2), "cores": Cores(2, 2.0)},
            "warning",
            "few-host-cores",
            {"cores": 2, "devices": 2, "least": 4},
        ),
        (
            None,
            {"devices": BROKEN},
            "error",
            "device-broken",
            {"device": 0, "said": "XlaRuntimeError: INTERNAL: bad"},
        ),
        (
            None,
            {"devices": (), "jax_errors": {"": "bogus backend"}},
            "error",
            "no-backend",
            {"said": "bogus backend"},
        ),
        (
            HostFacts(paths=GPU, packages=JAX),
            {"devices": ()},
            "error",
            "no-devices",
            {"reason": fact("cuda-plugin-missing", jax="0.10.2")},
        ),
        (None, {"processes": 4}, "error", "processes-apart", {"processes": 4}),
        (
            OLD,
            {"devices": kinds("Tesla T4")},
            "warning",
            "driver-old",
            {"reason": fact("driver-too-old", driver="470.82.01", cuda="12", oldest=525)},
        ),
    ],
)
def test_each_problem_alone(facts, changes, severity, code, numbers):
    (problem,) = listed(facts, **changes)
    assert (problem.severity, problem.fact.code) == (severity, code)
    assert {name: problem.fact[name] for name in numbers} == numbers
    assert problem.what and problem.why and problem.fix
    assert json.loads(json.dumps(problem.to_json()))["code"] == code


def test_hosts_that_met_are_no_problem():
    assert listed(processes=4, joined=4) == []


def test_errors_come_first():
    devices = (DeviceLine(1, "cpu", "cpu", error="x"), *kinds(*["cpu"] * 31))
    assert [p.severity for p in listed(devices=devices, float64=True)] == ["error", "warning", "note"]


@pytest.fixture(scope="module")
def report():
    return look()


def test_the_json_has_its_keys_and_survives_json(report):
    body = report.to_json()
    assert json.loads(json.dumps(body)) == body
    assert list(body) == [
        "platform", "device_count", "simulated", "processes", "devices", "host",
        "versions", "problems", "ok",
    ]  # fmt: skip
    assert (body["platform"], body["device_count"], body["simulated"]) == ("cpu", 8, True)
    assert set(body["devices"][0]) == {
        "id", "platform", "kind", "process", "chip", "memory_bytes", "memory_used_bytes", "error",
    }  # fmt: skip
    assert {d["error"] for d in body["devices"]} == {None}
    assert body["host"]["cores_usable"] > 0
    assert body["versions"]["jax"] and body["versions"]["libtpu"] == gather().packages.get("libtpu")
    assert set(body["versions"]) >= {"chipwise", "python", "jaxlib", "numpy", "cuda plugin", "nvidia driver"}


def test_an_error_makes_it_fail(report):
    failed = dataclasses.replace(report, devices=())
    assert failed.failed and not failed.to_json()["ok"]


def test_an_accelerator_left_alone_is_reported():
    report = look(facts=HostFacts(paths=GPU, packages=JAX))  # the test suite itself asks for the CPU
    assert not report.failed and "accelerator-left-alone" in [p.fact.code for p in report.problems]
