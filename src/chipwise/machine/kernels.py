"""The kernels that XLA chose by timing, kept in a file, so that every process takes the same.

XLA writes them as a message `AutotuneResults`: for each product and convolution, on a kind of GPU,
the kernel of a library. It reads such a file once in a process, and keeps these kernels, and those
that it times itself, until the process ends. Checked with the compiler of jaxlib 0.10.2.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..base import DeviceError
from ..base.files import home, put_inside, read_inside
from .host_facts import installed

FILE = "kernels.textproto"
TUNED = "tuned"
MOST_BYTES = 1 << 22
LOAD, DUMP, COMPLETE, FOLDER = (
    "xla_gpu_load_autotune_results_from",
    "xla_gpu_dump_autotune_results_to",
    "xla_gpu_require_complete_aot_autotune_results",
    "xla_gpu_per_fusion_autotune_cache_dir",
)
"""XLA's options: the file to read and to write, whether the program may have a kernel that was not
read, and a folder of kernels that processes share."""

LIBRARIES = ("nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cublas", "nvidia-cudnn-cu13")
"""The packages of cuBLAS and cuDNN, for CUDA 12 and 13."""

_ENTRY = re.compile(r"results \{\n(?: .*\n)+\}\n")
_WHOLE = re.compile(rf"(?:# .*\n)*version: \d+\n(?:{_ENTRY.pattern})+")
_GRADIENT = re.compile(r"__cudnn\$convBackward| convolution\(")

_ENCODED = re.compile(r"\\[0-7xuU]")
"""A character by its number. XLA writes none, and one could hide a gradient."""

FREE = "exact=False"
_UNREAD = "kernels that did not load"
_held: dict[str, str] = {}  # what a process has taken for a platform: FREE, _UNREAD or a digest
_loaded: dict[str, Kernels] = {}  # by the option that names their file


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of a file with this `text`."""

    text: str = dataclasses.field(repr=False)

    @property
    def digest(self) -> str:
        """The SHA-256 of the file's bytes."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def path(self) -> Path:
        """Where XLA reads them. The name is part of the keys of JAX's cache of compiled programs,
        so it says what the file has."""
        return home() / "kernels" / f"{self.digest}.textproto"


def stated(kernels: Kernels | None) -> dict[str, str]:
    """The fields of a run, its ledger and its result about its kernels: none, or their digest."""
    return {} if kernels is None else {"kernels": kernels.digest}


def libraries() -> str:
    """The versions of the libraries with the kernels, as lines of comment. A file has the number of
    a product's kernel in the list of its version of cuBLASLt, and only cuDNN's version in words."""
    known = {name: installed(name) for name in LIBRARIES}
    return "".join(f"# {name} {version}\n" for name, version in known.items() if version)


def steady(text: str) -> str:
    """Leaves out the gradients of convolutions. Some of cuDNN's kernels for these add with atomics,
    and XLA does not say which: it times all of them, or takes the first that adds in one order."""
    return libraries() + _ENTRY.sub(lambda one: "" if _GRADIENT.search(one[0]) else one[0], text)


def read(path: str | Path) -> Kernels:
    """Reads a file that `--kernels tuned` has made. Raises `DeviceError` for one that is missing,
    damaged, or has gradients of convolutions, as XLA's own files do."""
    try:
        text = read_inside(Path(path), MOST_BYTES).decode()
    except OSError as error:
        raise DeviceError("kernels-unreadable", path=str(path), reason=error) from None
    except UnicodeDecodeError:
        text = ""
    if not _WHOLE.fullmatch(text) or _ENCODED.search(text):
        raise DeviceError("kernels-broken", path=str(path), reason="no AutotuneResults of XLA")
    if unsteady := len(_GRADIENT.findall(text)):
        raise DeviceError("kernels-unsteady", path=str(path), count=unsteady)
    return Kernels(text)


def claim(platform: str, exact: bool, kernels: Kernels | None = None) -> None:
    """Raises `DeviceError` for a step with other kernels than those that this process has used. XLA
    takes these whatever a later program's options say (jaxlib 0.11.2)."""
    before = _held.get(platform)
    now = FREE if not exact else stated(kernels).get("kernels")
    if platform == "cpu":
        return
    if exact and before not in (None, now):
        raise DeviceError("kernels-tuned", before=before, now=now or "exact=True")
    if now is not None:
        _held[platform] = now


def loaded() -> Kernels | None:
    """The kernels that this process has loaded."""
    return _loaded.get(LOAD)


def options(platform: str, exact: bool) -> dict[str, Any]:
    """XLA's options for every exact program of a GPU: the kernels of this process, and none from
    the folder beside JAX's cache of programs, where programs with `exact=False` keep theirs."""
    if platform != "gpu" or not exact:
        return {}
    return {FOLDER: "", **{name: str(kernels.path) for name, kernels in _loaded.items()}}


def load(kernels: Kernels, device: jax.Device, path: str) -> None:
    """Makes `kernels` those of this process, before it compiles anything for `device`.

    Compiles a product that every file has, which XLA refuses to do if the file's kernels are those
    of another GPU or another version of cuDNN. Raises `DeviceError`, which names `path`.
    """
    theirs, here = kernels.text.partition("version:")[0], libraries()
    if theirs != here:
        both = {"theirs": theirs.splitlines(), "here": here.splitlines()}
        raise DeviceError("kernels-of-other-libraries", path=path, **both)
    before = _held.get(device.platform)
    claim(device.platform, True, kernels)
    if loaded() == kernels:
        return
    try:
        kernels.path.parent.mkdir(parents=True, exist_ok=True)
        put_inside(kernels.path, kernels.text.encode(), durable=False)
    except OSError as error:
        _held.pop(device.platform)
        _held.update({} if before is None else {device.platform: before})
        raise DeviceError("kernels-unkept", path=str(kernels.path), reason=error) from None
    _held[device.platform] = _UNREAD  # XLA does not read a second file
    asked: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_deterministic_ops": True}
    asked |= {FOLDER: "", LOAD: str(kernels.path), COMPLETE: True}
    place = jax.sharding.SingleDeviceSharding(device)
    try:
        jax.jit(_unique(), compiler_options=asked).lower(probe(place)).compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        if "Duplicate" in reason:  # this process has timed some by itself
            raise DeviceError("kernels-tuned", before=reason, now=kernels.digest) from None
        if reason.startswith("NOT_FOUND"):
            devices = sorted(set(re.findall(r'(?m)^  device: "(.*)"$', kernels.text)))
            here = device.device_kind
            raise DeviceError("kernels-foreign", path=path, devices=devices, here=here) from None
        raise DeviceError("kernels-broken", path=path, reason=reason) from None
    _loaded[LOAD] = kernels
    _held[device.platform] = kernels.digest


def probe(place: Any = None) -> jax.ShapeDtypeStruct:
    """The argument of `product`, the product that every file has."""
    return jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=place)


def product(x: jax.Array) -> jax.Array:
    """A product whose kernel every file has."""
    return x @ x


def _unique() -> Any:
    """`product` by a name that JAX's cache cannot have: otherwise XLA would not read the file."""

    def one(x: jax.Array) -> jax.Array:
        return product(x)

    one.__name__ = f"product_{secrets.token_hex(8)}"
    return one
