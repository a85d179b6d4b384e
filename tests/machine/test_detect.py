import os
import subprocess
import sys
import textwrap

import jax
import pytest
from jaxlib import xla_client

from chipwise.base.errors import DeviceError
from chipwise.machine.detect import FRACTIONS, detect, take_memory
from chipwise.machine.guard import accelerators
from chipwise.machine.host_facts import gather, installed
from refusals import refused


def test_every_device_is_used_by_default():
    machine = detect()
    assert (machine.platform, machine.kind, machine.available) == ("cpu", "cpu", 8)
    assert machine.devices == tuple(jax.devices()) and machine.simulated


@pytest.mark.parametrize("count", [1, 7, 8])
def test_fewer_devices_are_the_first(count):
    machine = detect(count)
    assert machine.devices == tuple(jax.devices()[:count])
    assert machine.available == 8 and machine.simulated


def test_more_devices_than_found_says_what_to_type():
    with refused(DeviceError, "devices-missing", count=9, here=8, kind="cpu") as caught:
        detect(9)
    assert "--devices 8" in str(caught.value) and "--simulate 9" in str(caught.value)


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_a_count_must_be_a_whole_number(count):
    with refused(DeviceError, "device-count-not-whole", count=count):
        detect(count)


def test_an_unknown_platform_suggests_the_nearest():
    with refused(DeviceError, "platform-unknown", platform="tpus", hint="tpu"):
        detect(platform="tpus")


def test_an_absent_platform_is_explained():
    with refused(DeviceError, "platform-kept-out", platform="tpu") as caught:
        detect(platform="tpu")
    assert caught.value.facts["setting"]["variable"] == "JAX_PLATFORMS"
    assert detect(platform="cpu").devices == tuple(jax.devices())


def test_processes_that_others_joined_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with refused(DeviceError, "joined-by-others", processes=2):
        detect()


@pytest.mark.slow
def test_one_cpu_is_not_simulated_and_cpu_starts_no_other_backend(fresh_python):
    said = fresh_python("""
        import jax
        from chipwise.machine.detect import detect
        machine = detect(platform="cpu")
        print(machine.available, machine.simulated, jax.config.jax_platforms, detect().platform)
    """)
    assert said == "1 False cpu cpu"


@pytest.mark.parametrize(
    "given, started, taken",
    [
        ({}, False, "0.9"),
        ({}, True, None),  # JAX has read it
        ({FRACTIONS[0]: "0.5"}, False, "0.5"),
        ({FRACTIONS[1]: "0.5"}, False, None),
    ],
)
def test_a_gpu_s_memory_is_taken_but_for_a_tenth_unless_the_user_says(monkeypatch, given, started, taken):
    monkeypatch.setattr("chipwise.machine.detect.started", lambda: started)
    for name in FRACTIONS:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    take_memory()
    assert os.environ.get(FRACTIONS[0]) == taken
    if taken:  # what JAX makes of it
        assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == float(taken)
    os.environ.pop(FRACTIONS[0], None)


@pytest.mark.skipif(
    bool(accelerators(gather()) or installed("libtpu")),
    reason="needs a host without accelerators to pretend on",
)
def test_a_promised_tpu_that_jax_does_not_find_is_refused_until_overridden(fresh_python):
    said = fresh_python(
        """
        from chipwise.machine.detect import detect
        from chipwise.machine.devices_report import look
        from chipwise.base import DeviceError
        for arguments in ({}, {"count": 1}):
            try:
                detect(**arguments)
            except DeviceError as error:
                (unused,) = error.facts["unused"]
                print(error.code, *unused["evidence"], unused["reason"].code)
        print(look().problems[0].severity)
        print(detect(platform="cpu").platform)
        """,
        TPU_NAME="local",
        TPU_WORKER_ID="0",
    ).splitlines()
    assert said == [*["cpu-fallback TPU_NAME TPU_WORKER_ID libtpu-missing"] * 2, "error", "cpu"]


@pytest.fixture
def fresh_python(clean_environment):
    def run(code: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**clean_environment, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
