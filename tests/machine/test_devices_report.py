"""The report of `chipwise devices`: of this host, and of hosts described as values."""

import csv
import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from chipwise.base.facts import fact
from chipwise.chips import catalogue, targets
from chipwise.chips.catalogue import CHIPS, Chip, cell
from chipwise.machine.detect import FRACTIONS, Machine, take_memory
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


def pretended(kind, mib, cores=36, capability="12.0"):
    """A GPU as JAX shows it, which may take three quarters of its memory."""
    return types.SimpleNamespace(
        id=0,
        platform="gpu",
        device_kind=kind,
        process_index=0,
        core_count=cores,
        compute_capability=capability,
        memory_stats=lambda: {"bytes_limit": int(mib * 2**20 * 0.75)} if mib else {},
    )


@pytest.fixture(autouse=True)
def no_share(monkeypatch):
    """None is set before a test, and none remains of one that the code sets."""
    for name in FRACTIONS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def looked(monkeypatch, *devices):
    monkeypatch.setattr("jax.local_devices", lambda: devices)
    monkeypatch.setattr("jax.device_put", lambda value, device: np.asarray(value).view(Ready))
    return look(HostFacts(packages=JAX))


class Ready(np.ndarray):
    def block_until_ready(self):
        return self


def chip_of(row):
    types_of = {field.name: str(field.type) for field in dataclasses.fields(Chip)}
    cells = dict(zip(types_of, next(csv.reader([row])), strict=True))
    return Chip(**{name: cell(types_of[name], value) for name, value in cells.items()})


def test_of_an_unlisted_gpu_the_row_to_add_is_shown(monkeypatch):
    kind = "NVIDIA GeForce RTX 5060"
    report = looked(monkeypatch, *[pretended(kind, 8_151, cores=30)] * 2)
    (told,) = [problem.fact for problem in report.problems if problem.fact.code == "chip-unlisted"]
    assert told["kind"] == kind and told["row"] in str(report.to_json()["problems"])
    chip = chip_of(told["row"])
    assert (chip.name, chip.names, chip.device_kinds) == ("RTX 5060", ("rtx-5060",), (kind,))
    assert (chip.memory_GB, chip.cuda_MiB, chip.streaming_multiprocessors) == (8, 8_151, 30)
    assert chip.compute_capability == "12.0" and chip.fp32_tflops is None and chip.verified


@pytest.fixture
def adds(monkeypatch):
    """Adds a chip to the catalogue."""

    def add(chip):
        for module in (catalogue, targets):
            monkeypatch.setattr(module, "CHIPS", (*CHIPS, chip))
        forget()

    def forget():
        catalogue.named.cache_clear()
        catalogue.find.cache_clear()

    yield add
    forget()


@pytest.mark.parametrize(
    ("kind", "mib", "name"),
    [
        ("NVIDIA GeForce RTX 3080", 20_054, "rtx-3080-20gb"),  # beside two namesakes
        ("NVIDIA GeForce RTX 3060", 8_191, "rtx-3060-8gb"),  # beside one
        ("NVIDIA GeForce RTX 5060", 8_151, "rtx-5060"),
        ("NVIDIA GeForce RTX 5060", None, "rtx-5060"),  # of a memory that JAX does not tell
        ("GeForce RTX 2080 Ti", 11_019, "rtx-2080-ti"),  # as old drivers write it
    ],
)
def test_the_row_to_add_leaves_every_name_its_chip(monkeypatch, adds, kind, mib, name):
    before = {known: targets.parse(known).chip for known in targets.names()}
    (line,) = looked(monkeypatch, pretended(kind, mib, capability="7.5")).devices
    added = chip_of(line.row)
    adds(added)
    assert {known: targets.parse(known).chip for known in targets.names()} == before | {
        name: added,
        f"{name}:8": added,
    }
    (line,) = looked(monkeypatch, pretended(kind, mib)).devices
    assert (line.chip, line.row) == (added.name, None)


@pytest.mark.parametrize("named", ["AMD Instinct MI300X", "Radeon RX 7900 XTX"])
def test_a_gpu_of_another_maker_has_no_row(monkeypatch, named):
    report = looked(monkeypatch, pretended(named, 24_560, capability="gfx942"))
    assert report.devices[0].row is None and "chip-unlisted" not in {p.fact.code for p in report.problems}


@pytest.mark.parametrize(
    ("kind", "mib", "variable", "chip"),
    [
        ("NVIDIA GeForce RTX 3080", 12_044, None, "RTX 3080 (12 GB)"),
        ("Tesla T4", 15_095, None, "T4"),
        # set when JAX had started, by other code: a chip without namesakes is known all the same
        ("Tesla T4", 15_095, "0.9", "T4"),
        ("NVIDIA H100 80GB HBM3", 81_007, "0.9", "H100-SXM5-80GB"),
    ],
)
def test_a_chip_is_known_if_jax_started_with_its_own_share(monkeypatch, kind, mib, variable, chip):
    """As in a notebook that called `jax.devices()` first."""
    jax.devices()
    device = pretended(kind, mib)
    if variable:
        monkeypatch.setenv(FRACTIONS[0], variable)
    take_memory()
    assert Machine("gpu", kind, (device,), 1, False).listed.name == chip
    (line,) = looked(monkeypatch, device).devices
    assert (line.chip, line.row) == (chip, None)


@pytest.mark.parametrize(
    ("kind", "mib", "chip", "row"),
    [
        ("NVIDIA GeForce RTX 5060 Ti", 16_311, "RTX 5060 Ti (16 GB)", False),
        ("NVIDIA GeForce RTX 5060 Ti", 8_151, "RTX 5060 Ti (8 GB)", False),
        ("NVIDIA GeForce RTX 5060 Ti", None, None, False),  # one of the two
        ("NVIDIA GeForce RTX 3080", 20_054, None, True),  # neither of them
        ("NVIDIA L4", 22_563, "L4", False),
    ],
)
def test_cards_of_one_name_are_told_apart_by_their_memory(monkeypatch, kind, mib, chip, row):
    (line,) = looked(monkeypatch, pretended(kind, mib)).devices
    assert (line.chip, line.row is not None) == (chip, row)


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
        "row",
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
