"""JAX's CUDA plugin on a host without a GPU, libtpu on one without a TPU. Neither need be installed: what is
in their place is looked at."""

import os
import subprocess
import sys

import pytest

from chipwise.machine import absent, guard
from chipwise.machine.facts import gather
from chipwise.planner.compile_processes import compiler_environment

SEEN = """
import sys
import chipwise
print("jax" in sys.modules, sys.modules.get("jax_cuda12_plugin", "there"), sys.modules.get("libtpu", "there"))
import jax
loaded = "libtpu.so" in open("/proc/self/maps").read()
print(jax.devices()[0].platform, sys.modules["jax_plugins.xla_cuda12"].__doc__[:5], loaded)
"""


@pytest.mark.skipif(bool(guard.accelerators(gather())), reason="an accelerator is here")
def test_importing_the_package_keeps_jax_from_the_plugin():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    ran = subprocess.run([sys.executable, "-c", SEEN], env=environment, capture_output=True, text=True)
    assert ran.stdout.splitlines() == ["False None None", "cpu Empty False"], ran.stderr
    assert ran.stderr == ""


@pytest.mark.parametrize(
    "variables, there, wanted",
    [
        ({}, False, False),
        ({}, True, True),
        ({"JAX_PLATFORMS": "cpu"}, False, False),
        ({"JAX_PLATFORMS": "cuda,cpu"}, False, True),
        ({"JAX_PLATFORMS": "gpu"}, False, True),
        ({absent.COMPILING: "cuda"}, False, True),
        ({absent.COMPILING: "tpu"}, False, False),
    ],
)
def test_who_wants_it(monkeypatch, tmp_path, variables, there, wanted):
    for name in ("JAX_PLATFORMS", absent.COMPILING):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(absent, "GPUS", (str(tmp_path) if there else str(tmp_path / "none"),))
    assert absent.wanted() is wanted


def test_what_jax_finds_in_its_place_registers_nothing(monkeypatch):
    monkeypatch.setattr(absent, "wanted", lambda: False)
    names = [f"jax_plugins.xla_cuda{n}" for n in (12, 13)] + [f"jax_cuda{n}_plugin" for n in (12, 13)]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    absent.leave_cuda_alone()
    assert sys.modules[names[0]].initialize() is None and sys.modules[names[2]] is None
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    "variables, shown, wanted",
    [
        ({}, None, False),
        ({}, "dev/accel0", True),
        ({}, "dev/vfio/7", True),
        ({}, "dev/accel/accel0", False),  # a laptop's NPU
        ({}, "lib/libtpu.so", True),
        ({"JAX_PLATFORMS": "cpu"}, None, False),
        ({"JAX_PLATFORMS": "tpu,cpu"}, None, True),
        ({"TPU_NAME": "mine"}, None, True),
        ({absent.COMPILING: "tpu"}, None, True),
        ({absent.COMPILING: "cuda"}, None, False),
    ],
)
def test_who_wants_libtpu(monkeypatch, tmp_path, variables, shown, wanted):
    for name in ("JAX_PLATFORMS", absent.COMPILING, *absent.TPU_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for level in ("TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL"):
        monkeypatch.setenv(level, "0"), monkeypatch.delenv(level)  # so that it is gone afterwards
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(absent, "TPUS", tuple(f"{tmp_path}{pattern}" for pattern in absent.TPUS))
    monkeypatch.setattr(absent, "CARDS", str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "libtpu", sys)
    monkeypatch.setenv("TPU_LIBRARY_PATH", "another.so")
    monkeypatch.setenv(absent.LIBTPU, "")
    if shown:
        (tmp_path / shown).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / shown).touch()
    absent.leave_libtpu_alone()
    assert (sys.modules["libtpu"] is sys) is wanted
    assert (os.environ.get("TPU_STDERR_LOG_LEVEL") == "3") is wanted
    assert ("TPU_LIBRARY_PATH" in os.environ) is wanted
    assert compiler_environment("tpu")["TPU_LIBRARY_PATH"] == "another.so"
