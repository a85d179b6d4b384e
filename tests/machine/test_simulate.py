"""Each in a fresh Python, since a process fixes its devices once."""

import subprocess
import sys
import textwrap

import jax
import pytest

from chipwise.base.errors import DeviceError
from chipwise.machine.detect import simulate
from refusals import refused


def python(code, environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


@pytest.mark.slow
def test_devices_are_made_again_and_again_but_not_changed(clean_environment):
    said = python(
        """
        import jax
        from chipwise.machine.detect import detect
        from chipwise.machine.detect import simulate, started
        from chipwise.base import DeviceError
        simulate(3)
        simulate(5)  # still free to change
        print(started(), jax.config.jax_num_cpu_devices)
        machine = detect()
        print(len(machine.devices), machine.platform, machine.simulated, started())
        simulate(5)
        try:
            simulate(6)
        except DeviceError as error:
            print(error.code, error.facts)
        """,
        clean_environment,
    )
    assert said[:2] == ["False 5", "5 cpu True True"]
    assert said[2] == f"simulate-too-late {dict(count=6, here=5, kind='cpu')}"


@pytest.mark.slow
def test_the_users_own_flags_stay_and_another_count_in_them_gives_way(clean_environment):
    flags = "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=2"
    said = python(
        """
        import os, jax
        from chipwise.machine.detect import simulate
        simulate(4)
        print(len(jax.devices()), os.environ["XLA_FLAGS"])
        """,
        {**clean_environment, "XLA_FLAGS": flags},
    )
    assert said == [f"4 {flags}"]


@pytest.mark.slow
def test_the_remedy_that_the_error_names_works(clean_environment):
    environment = {**clean_environment, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "6"}
    said = python("from chipwise.machine.detect import detect; print(len(detect().devices))", environment)
    assert said == ["6"]


def test_after_the_start_only_the_same_number_will_do():
    assert len(jax.devices()) == 8  # what the test suite runs on
    simulate(8)
    with refused(DeviceError, "simulate-too-late", count=4, here=8):
        simulate(4)


@pytest.mark.parametrize("n", [0, -1, 10**400])
def test_the_number_must_be_positive_and_possible(n):
    with refused(DeviceError, "device-count-not-whole", count=n):
        simulate(n)
