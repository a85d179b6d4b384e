import os
from pathlib import Path

import pytest

from chipwise.base.errors import DeviceError
from chipwise.compile import processes
from planner.asked import compile_all, request_for
from refusals import refused


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Packages that are installed, by name, to be changed; and `ptxas`, in an empty package of NVIDIA's."""
    there = {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.2", "jax-cuda12-pjrt": "0.10.2"}
    monkeypatch.setattr(processes, "installed", there.get)
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "ptxas").touch(mode=0o755)
    return there


def test_a_gpu_s_compiler_is_the_plugin_with_its_assembler(packages, tmp_path):
    found = processes.gpu_compiler()
    assert found.path == str(tmp_path) and "0.10.2" in found.versions
    made = processes.compiler_environment(found.platform, found.path)
    assert made["PATH"].split(os.pathsep)[0] == str(tmp_path)
    assert (made["JAX_PLATFORMS"], made["CUDA_VISIBLE_DEVICES"]) == ("cpu", "-1")


def test_each_thing_in_the_way_of_a_gpu_s_compiler_is_one_line(packages, tmp_path):
    (tmp_path / "ptxas").unlink()
    with refused(DeviceError, "ptxas-missing", install="pip install nvidia-cuda-nvcc-cu12"):
        processes.gpu_compiler()
    same = "pip install jax-cuda12-plugin==0.11.0 jax-cuda12-pjrt==0.11.0"
    packages["jaxlib"] = packages["jax"] = "0.11.0"
    with refused(DeviceError, "compiler-of-another-jax", package="jax-cuda12-plugin", install=same):
        processes.gpu_compiler()
    packages["jax-cuda12-plugin"] = "0.11.0"
    with refused(DeviceError, "compiler-of-another-jax", package="jax-cuda12-pjrt", version="0.10.2"):
        processes.gpu_compiler()
    packages["jax-cuda13-plugin"] = "0.11.0"
    uninstall = "pip uninstall jax-cuda12-plugin jax-cuda12-pjrt"
    with refused(DeviceError, "compilers-in-the-way", uninstall=uninstall):
        processes.gpu_compiler()
    del packages["jax-cuda12-plugin"], packages["jax-cuda13-plugin"]
    with refused(DeviceError, "compiler-missing", install="pip install 'chipwise[plan-gpu]'"):
        processes.gpu_compiler()


def test_where_a_gpu_host_has_a_plugin_that_one_compiles(packages, tmp_path):
    packages |= {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2", "jax-cuda12-plugin": None}
    assert "cuda13" in processes.gpu_compiler().versions


def test_without_libtpu_the_pip_line_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "installed", lambda package: None)
    with refused(DeviceError, "compiler-missing", install="pip install 'chipwise[plan-tpu]'"):
        compile_all([request_for()], cache_dir=tmp_path)


def test_the_child_knows_nothing_of_a_real_tpu(monkeypatch):
    for name in ("TPU_PROCESS_BOUNDS", "MEGASCALE_NUM_SLICES", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, "2,2,1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-32")
    made = processes.compiler_environment("tpu")
    assert made["JAX_PLATFORMS"] == "cpu" and made["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert made["TPU_ACCELERATOR_TYPE"] == "v5litepod-8" and "HOME" in made
    assert not made.keys() & {"TPU_PROCESS_BOUNDS", "MEGASCALE_NUM_SLICES", "XLA_FLAGS"}
    assert "JAX_COMPILATION_CACHE_DIR" not in made
    assert (Path(made["PYTHONPATH"].split(os.pathsep)[0]) / "chipwise").is_dir()
