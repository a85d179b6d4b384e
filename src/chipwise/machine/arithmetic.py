"""What of a process can change a bit, besides its programs, kernels and chip. JAX's settings are
fixed, XLA's flags are refused, and versions are recorded and compared. `arithmetic.toml` has the
settings and the flags."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from ..base import DeviceError
from ..base.files import toml_beside
from .host_facts import installed
from .portable_cpu import FLAGS, asked

_TABLE = toml_beside(__file__)
_FIXED: dict[str, Any] = {"jax_default_matmul_precision": None, **_TABLE["settings"]}
_USUAL = {"NPROC": "8"}  # as `import chipwise` sets it
_HARMLESS = tuple(_TABLE["harmless_flags"])
_COMPARED = (
    "chipwise",
    "jax",
    "jaxlib",
    "libtpu",
    "flax",
    "optax",
    "numpy",
    "simplejpeg",
    "pillow",
)
_lock = threading.Lock()
_inside = 0
_before = dict[str, Any]()


@contextlib.contextmanager
def fixed() -> Iterator[None]:
    """A context, or a function's decorator, in which JAX computes as by default, whatever the
    process has set: in this thread, and in those that it starts. The last of several contexts puts
    the settings back."""
    global _inside
    from jax._src.config import config_states as states

    with contextlib.ExitStack() as own:
        with _lock:
            if _inside == 0:
                _before.clear()
            # Inside of others too, since the caller may change one
            for name, wanted in _FIXED.items():
                if name in states and _other(states[name].get_global(), wanted):
                    _before[name] = states[name].get_global()
                    states[name]._set(wanted)
            _inside += 1
        try:
            # Those of `with jax.enable_x64(True):` in this thread
            for name, wanted in _FIXED.items():
                if name in states and _other(states[name].value, wanted):
                    own.enter_context(states[name](wanted))
            yield
        finally:
            own.close()
            with _lock:
                _inside -= 1
                if _inside == 0:
                    for name, value in _before.items():
                        states[name]._set(value)


def _other(value: Any, wanted: Any) -> bool:
    value = getattr(value, "value", value)  # of an enumeration
    return value != wanted and not (value is None and wanted == "allow")


def check_flags(platform: str) -> None:
    """Raises `DeviceError` for variables of the environment by which XLA computes other bits."""
    if found := _flags(platform):
        variable, value = next(iter(found.items()))
        raise DeviceError("flags-change-results", variable=variable, value=value)


def settings() -> dict[str, str]:
    """The variables of the environment for compilers and libraries that may change a bit: variable
    to value."""
    more = {name: os.environ.get(name) for name in ("LIBTPU_INIT_ARGS", "NPROC")}
    return _flags("gpu") | {v: text for v, text in more.items() if text and text != _USUAL.get(v)}


def _flags(platform: str) -> dict[str, str]:
    harmless = (*_HARMLESS, *FLAGS) if asked() else _HARMLESS
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(harmless)]
    found = {"XLA_FLAGS": " ".join(flags)} if flags else {}
    override = os.environ.get("NVIDIA_TF32_OVERRIDE") if platform == "gpu" else None
    return found | ({"NVIDIA_TF32_OVERRIDE": override} if override else {})


def versions() -> dict[str, str | None]:
    """The versions of the packages that compute, or decode what is computed with."""
    return {package: installed(package) for package in _COMPARED}
