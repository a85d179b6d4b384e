"""JAX's CUDA plugin on a host without a GPU. It need not be installed: what is in its place is looked at."""

import os
import subprocess
import sys

import pytest

from chipwise.machine import absent, guard
from chipwise.machine.facts import gather

SEEN = """
import sys
import chipwise
print("jax" in sys.modules, sys.modules.get("jax_cuda12_plugin", "there"))
from chipwise.machine.detect import detect
print(detect().platform, sys.modules["jax_plugins.xla_cuda12"].__doc__[:5])
"""


@pytest.mark.skipif(bool(guard.accelerators(gather())), reason="an accelerator is here")
def test_importing_the_package_keeps_jax_from_the_plugin():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    ran = subprocess.run([sys.executable, "-c", SEEN], env=environment, capture_output=True, text=True)
    assert ran.stdout.splitlines() == ["False None", "cpu Empty"], ran.stderr
    assert ran.stderr == ""


@pytest.mark.parametrize(
    "variables, there, wanted",
    [
        ({}, False, False),
        ({}, True, True),
        ({"JAX_PLATFORMS": "cpu"}, False, False),
        ({"JAX_PLATFORMS": "cuda,cpu"}, False, True),
        ({"JAX_PLATFORMS": "gpu"}, False, True),
        ({absent.COMPILING: "1"}, False, True),
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
