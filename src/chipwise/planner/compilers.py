"""Finds the installed compilers of absent chips, and the environment that their processes need.

TPUs use libtpu. GPUs use JAX's CUDA plugin with NVIDIA's `ptxas`, which need neither a driver nor CUDA's
libraries. Each runs in a separate process, so a plan cannot disturb the chips of this machine.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import DeviceError
from ..machine.absent import COMPILING, LIBTPU
from ..machine.facts import installed

PIP = "pip install 'chipwise[plan]'"
CUDA = ("13", "12")
"""The CUDA versions of JAX's plugins: where both are installed, JAX takes the first."""

_PTXAS = {"12": ("cuda_nvcc/bin",), "13": ("cu13/bin",)}
"""Where NVIDIA's package for each keeps its assembler, below the package `nvidia`."""


@dataclass(frozen=True)
class Compiler:
    """`platform`: "tpu" or "cuda"; `versions`: those that its answers depend on; `path`: the first folder on
    the PATH of its process."""

    platform: str
    versions: str
    path: str | None = None

    def environment(self) -> dict[str, str]:
        """The environment of its process: see `child_environment`."""
        return child_environment(self.platform, self.path)


def tpu_compiler() -> Compiler:
    """The installed libtpu. Raises `DeviceError` if there is none."""
    version = installed("libtpu")
    if version is None:
        raise DeviceError("compiler-missing", chips="TPUs", install="pip install 'chipwise[plan-tpu]'")
    return Compiler("tpu", f"{_jax()} libtpu {version}")


def gpu_compiler() -> Compiler:
    """The CUDA plugin that JAX would load, with the `ptxas` of its CUDA version.

    Raises `DeviceError` if none or two are installed, if its version differs from jaxlib's, or if there is no
    `ptxas`.
    """
    plugins = {cuda: version for cuda in CUDA if (version := installed(f"jax-cuda{cuda}-plugin"))}
    jaxlib, install = installed("jaxlib"), "pip install 'chipwise[plan-gpu]'"
    if not plugins:
        raise DeviceError("compiler-missing", chips="GPUs", install=install)
    if len(plugins) > 1:
        packages = [f"jax-cuda{cuda}-plugin" for cuda in plugins]
        unwanted = f"pip uninstall jax-cuda{CUDA[-1]}-plugin jax-cuda{CUDA[-1]}-pjrt"
        raise DeviceError("compilers-in-the-way", packages=packages, uninstall=unwanted)
    (cuda, version) = plugins.popitem()
    same = f"pip install jax-cuda{cuda}-plugin=={jaxlib} jax-cuda{cuda}-pjrt=={jaxlib}"
    for package in (f"jax-cuda{cuda}-plugin", f"jax-cuda{cuda}-pjrt"):
        if (other := installed(package)) != jaxlib:
            numbers = {"package": package, "version": other or "no version", "jaxlib": jaxlib}
            raise DeviceError("compiler-of-another-jax", **numbers, install=same)
    folder = _ptxas(cuda)
    if folder is None:
        package = "nvidia-cuda-nvcc-cu12" if cuda == "12" else "nvidia-cuda-nvcc"
        raise DeviceError("ptxas-missing", install=f"pip install {package}")
    ptxas = installed("nvidia-cuda-nvcc-cu12" if cuda == "12" else "nvidia-cuda-nvcc")
    return Compiler("cuda", f"{_jax()} cuda{cuda} {version} ptxas {ptxas}", str(folder))


COMPILERS: dict[str, Callable[[], Compiler]] = {"tpu": tpu_compiler, "cuda": gpu_compiler}
"""By platform, as JAX calls it."""


def _jax() -> str:
    return f"jax {installed('jax')} jaxlib {installed('jaxlib')}"


def _ptxas(cuda: str) -> Path | None:
    """The folder of the package's `ptxas`, or else of one on PATH, whose version may not support the chip."""
    package = importlib.util.find_spec("nvidia")
    for place in package.submodule_search_locations or [] if package else []:
        for folder in _PTXAS[cuda]:
            if (Path(place) / folder / "ptxas").exists():
                return Path(place) / folder
    on_path = shutil.which("ptxas")
    return Path(on_path).parent if on_path else None


_FOREIGN = ("TPU_", "MEGASCALE_", "CLOUD_TPU_", "LIBTPU_", "PJRT_", "JAX_", "XLA_")


def child_environment(platform: str, path: str | None = None) -> dict[str, str]:
    """The environment of a process that loads a compiler only to compile.

    Variables that describe a real TPU VM and its place in a pod, or configure JAX and XLA here, are removed,
    except the path of another libtpu, so that answers depend only on the request. JAX stays on the CPU, so no
    chip is opened; with `ALLOW_MULTIPLE_LIBTPU_LOAD` no lock is needed that a process with this machine's
    chips may hold. libtpu asks no metadata server and writes no log files; the CUDA plugin sees no GPU.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    if libtpu := os.environ.get("TPU_LIBRARY_PATH", os.environ.get(LIBTPU)):
        kept["TPU_LIBRARY_PATH"] = libtpu
    here = str(Path(__file__).resolve().parents[2])
    kept["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [kept.get("PYTHONPATH")])])
    kept |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", COMPILING: platform}
    if platform == "cuda":
        folders = [*filter(None, [path, kept.get("PATH")])]
        return kept | {"CUDA_VISIBLE_DEVICES": "-1", "PATH": os.pathsep.join(folders)}
    return kept | {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_LOG_DIR": "disabled",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
    }
