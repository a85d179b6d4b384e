"""Exports programs for absent chips, to pass them to a compiler's process. Their keys do not depend
on source locations."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import export

from ..models.remat import inside

MOST_TRACED = 50
"""The number of exported programs whose traces JAX may keep. A plan of a small recipe exports about
three."""
CUDNN_VERSION = 91000
"""The cuDNN version for which programs for GPUs are traced. `chips.gpus.CUDNN` states the same
version to their compiler."""
# Source locations, which change without the program changing.
_PLACE = re.compile(r'(?m)^#loc\d* = loc\("([^"]+)":(\d+):')
_LOCATION = re.compile(r"(?m)^#loc.*\n?|\s*\bloc\((?:[^()]|\([^()]*\))*\)")


@dataclass(frozen=True)
class Contents:
    """The dtypes and the number of operations of a program."""

    dtypes: frozenset[str]
    """The dtypes of all arrays, by their NumPy names."""
    operations: int
    """The number of operations, with each loop body counted once. It is roughly proportional to the
    compilation time."""

    @classmethod
    def of(cls, jaxpr: Any) -> Contents:
        dtypes: set[str] = set()
        operations = 0
        for one in inside(jaxpr):
            variables = [*one.invars, *one.constvars, *(v for e in one.eqns for v in e.outvars)]
            dtypes |= {str(v.aval.dtype) for v in variables if hasattr(v.aval, "dtype")}
            operations += len(one.eqns)
        return cls(frozenset(dtypes), operations)


@dataclass(frozen=True)
class Exported:
    """A program exported for a platform."""

    key: str
    """The hash of the program without its source locations."""
    body: bytes = field(repr=False)
    """The program as `jax.export` serializes it."""
    places: tuple[str, ...]
    """The program's source lines, "path:line", each once, in the program's order."""
    contents: Contents
    devices: int
    """The devices that run the program together."""


@dataclass(frozen=True)
class Collective:
    """A program over all devices of a topology, which the compiler's process makes: a module of
    `jax.export` would hold the devices of this machine.

    `path`: "module:Class". `Class(**arguments).over(devices)` returns the program and the shapes of
    its argument. `key`: the hash of what that computes.
    """

    key: str
    path: str
    arguments: dict[str, Any]


def export_program(
    function: Callable[..., Any], specs: Sequence[Any], platform: str = "tpu"
) -> Exported:
    """Exports `function` of `specs` (trees of shapes) for a platform, with flat arguments and
    results. Runs nothing, and needs no chip of that platform. Raises the errors that `function`
    raises while it is traced."""
    leaves, tree = jax.tree.flatten(tuple(specs))

    def flat(*values):
        return tuple(jax.tree.leaves(function(*jax.tree.unflatten(tree, values))))

    # The compiler that reads the module has the version that wrote it.
    unchecked = [export.DisabledSafetyCheck.custom_call(name) for name in _LIBRARY_CALLS]
    jitted = jax.jit(flat, keep_unused=True)
    in_group = any(getattr(leaf, "sharding", None) is not None for leaf in leaves)
    with EXPORTING, cudnn_assumed(in_group):
        contents = Contents.of(jitted.trace(*leaves).jaxpr.jaxpr)
        exported = export.export(jitted, platforms=(platform,), disabled_checks=unchecked)(*leaves)
    text = exported.mlir_module()
    places = dict.fromkeys(f"{path}:{line}" for path, line in _PLACE.findall(text))
    key = hashlib.sha256(_LOCATION.sub("", text).encode()).hexdigest()
    _EXPORTED.append(key)
    body = bytes(exported.serialize())
    return Exported(key, body, tuple(places), contents, exported.nr_devices)


_EXPORTED: list[str] = []  # since JAX's caches were cleared


def forget_traces() -> None:
    """Clears JAX's caches if `MOST_TRACED` programs were exported since the last time. JAX keeps
    the trace of each of its own functions for each shape as long as the process lives, which takes
    1 to 2 MB for each plan of another small recipe. Other programs of this process are compiled
    again when they are called."""
    with EXPORTING:
        if len(_EXPORTED) >= MOST_TRACED:
            _EXPORTED.clear()
            jax.clear_caches()


EXPORTING = threading.RLock()
"""A lock, since `cudnn_assumed` changes JAX's module and each compiler's thread may export."""

_LIBRARY_CALLS = (
    "__cudnn$fmhaSoftmax",
    "__cudnn$fmhaSoftmaxBackward",
    "__cudnn$fmhaScaleBiasSoftmax",
    "__cudnn$fmhaScaleBiasSoftmaxBackward",
    "__cudnn$fmhaSoftmaxDropout",
    "__cudnn$fmhaSoftmaxDropoutBackward",
    "__gpu$xla.gpu.triton",
)
"""Custom calls that JAX refuses to export by default, since another version may change them."""


@contextlib.contextmanager
def cudnn_assumed(in_group: bool = False) -> Iterator[None]:
    """A context in which JAX lowers its attention without cuDNN and, in a group, without devices.

    JAX asks for the version of cuDNN, a library of 1 GB that compiling does not need. JAX also
    refuses to lower each primitive that it may have to partition on a mesh without devices. Inside
    `jax.shard_map`, where the layers of a group run, there is nothing to partition, and the
    lowering inserts the kernel's call. Outside a group, JAX needs a device of this host. JAX
    versions without these checks are left alone."""
    try:
        from jax._src import dispatch
        from jax._src.cudnn import fused_attention_stablehlo as module
    except ImportError:
        yield
        return
    asked = getattr(module, "check_cudnn_version", None)
    needing: set[Any] = getattr(dispatch, "prim_requires_devices_during_lowering", set())
    kernels = {p for p in needing if in_group and p.name.startswith("dot_product_attention")}
    if asked is not None:
        module.check_cudnn_version = lambda: CUDNN_VERSION
    needing -= kernels
    try:
        yield
    finally:
        if asked is not None:
            module.check_cudnn_version = asked
        needing |= kernels


def flat_positions(specs: Sequence[Any], arguments: Sequence[int]) -> tuple[int, ...]:
    """The positions of the leaves of some `arguments` among all leaves of `specs`."""
    counts = [len(jax.tree.leaves(s)) for s in specs]
    return tuple(i for a in arguments for i in range(sum(counts[:a]), sum(counts[: a + 1])))
