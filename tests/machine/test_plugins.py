"""JAX's CUDA plugin on a host without a GPU, libtpu on one without a TPU. Neither need be installed."""

import os
import subprocess
import sys

import pytest

from chipwise.compile.processes import compiler_environment
from chipwise.machine import guard, plugins
from chipwise.machine.host_facts import gather

SEEN = """
import sys
import chipwise as cw
recipe = cw.load("digits", ["duration=20st"])
assert "jax" in sys.modules
cw.fit(recipe, progress="none")
from jax._src import xla_bridge
print(sorted(xla_bridge.backends()), "libtpu.so" in open("/proc/self/maps").read())
print([name for name in sys.modules if name.startswith(("jax_cuda", "jax_plugins.", "libtpu"))])
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(guard.accelerators(gather())), reason="an accelerator is here")
def test_a_run_loads_no_plugin_of_an_absent_chip_and_says_nothing_of_it():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    ran = subprocess.run([sys.executable, "-c", SEEN], env=environment, capture_output=True, text=True)
    assert ran.stdout.splitlines() == ["['cpu'] False", "[]"], ran.stderr
    assert ran.stderr == ""


@pytest.mark.parametrize(
    "variables, there, wanted",
    [
        ({}, False, False),
        ({}, True, True),
        ({"JAX_PLATFORMS": "cpu"}, False, False),
        ({"JAX_PLATFORMS": "cuda,cpu"}, False, True),
        ({"JAX_PLATFORMS": "gpu"}, False, True),
        ({plugins.COMPILING: "cuda"}, False, True),
        ({plugins.COMPILING: "tpu"}, False, False),
    ],
)
def test_who_wants_it(monkeypatch, tmp_path, variables, there, wanted):
    for name in ("JAX_PLATFORMS", plugins.COMPILING):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plugins, "GPUS", (str(tmp_path) if there else str(tmp_path / "none"),))
    assert plugins.gpu_wanted() is wanted


def test_the_cuda_plugin_that_jax_finds_registers_nothing_and_then_all_is_as_before(monkeypatch):
    monkeypatch.setattr(plugins, "gpu_wanted", lambda: False)
    names = [f"jax_plugins.xla_cuda{n}" for n in (12, 13)] + [f"jax_cuda{n}_plugin" for n in (12, 13)]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, names[3], sys)
    with plugins.hidden():
        assert sys.modules[names[0]].initialize() is None and sys.modules[names[2]] is None
    assert sys.modules[names[3]] is sys and not sys.modules.keys() & names[:3]


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
        ({plugins.COMPILING: "tpu"}, None, True),
        ({plugins.COMPILING: "cuda"}, None, False),
    ],
)
def test_who_wants_libtpu(monkeypatch, tmp_path, variables, shown, wanted):
    for name in ("JAX_PLATFORMS", plugins.COMPILING, *plugins.TPU_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for level in ("TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL"):
        monkeypatch.setenv(level, "0"), monkeypatch.delenv(level)  # so that it is gone afterwards
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plugins, "TPUS", tuple(f"{tmp_path}{pattern}" for pattern in plugins.TPUS))
    monkeypatch.setattr(plugins, "CARDS", str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "libtpu", sys)
    monkeypatch.setenv("TPU_LIBRARY_PATH", "another.so")
    monkeypatch.setenv(plugins.LIBTPU, "")
    if shown:
        (tmp_path / shown).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / shown).touch()
    with plugins.hidden():
        assert (sys.modules["libtpu"] is sys) is wanted
        assert (os.environ.get("TPU_STDERR_LOG_LEVEL") == "3") is wanted
        assert ("TPU_LIBRARY_PATH" in os.environ) is wanted
        assert compiler_environment("tpu")["TPU_LIBRARY_PATH"] == "another.so"
    assert sys.modules["libtpu"] is sys and os.environ["TPU_LIBRARY_PATH"] == "another.so"


def test_a_process_of_chipwises_own_runs_a_module_with_its_arguments(tmp_path):
    (tmp_path / "there.py").write_text(
        "import sys\nassert __name__ == '__main__'\nprint(*sys.argv[1:], 'jax' in sys.modules)"
    )
    command = [sys.executable, "-m", "chipwise.machine.plugins", "there", "a", "b"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.split() == ["a", "b", "False"], ran.stderr
