"""Exports programs for a compiler's process: modules of `jax.export`, without source locations."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import jax
from jax import export

from ..engine import layout as replicas
from ..engine import reduce
from ..engine.reduce import Exchange
from ..models.remat import inside

CUDNN_VERSION = 91000
"""That programs for GPUs are traced for, and `chips.gpus.CUDNN` says to their compiler."""
# Source locations, which change without the program changing.
_PLACE = re.compile(r'(?m)^#loc\d* = loc\("([^"]+)":(\d+):')
_LOCATION = re.compile(r"(?m)^#loc.*\n?|\s*\bloc\((?:[^()]|\([^()]*\))*\)")


@dataclass(frozen=True)
class Contents:
    """`dtypes`: of all arrays of a program, by their NumPy names. `operations`: their number, loop bodies
    once: roughly proportional to compilation time."""

    dtypes: frozenset[str]
    operations: int

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
    """A program without source locations. `key`: the hash of what it computes; `size`: of `body` in bytes;
    `places`: its source lines, "path:line", each once in the program's order; `write`: gives its `body`, None
    for a program of which only the rest is known."""

    key: str
    size: int
    places: tuple[str, ...]
    contents: Contents
    write: Callable[[], bytes] | None = field(default=None, repr=False, compare=False)

    @functools.cached_property
    def body(self) -> bytes:
        """Written by `jax.export`."""
        assert self.write is not None
        return self.write()

    def entry(self, folder: Path, name: str) -> dict[str, Any]:
        """The entry for `compile_child`."""
        (folder / name).write_bytes(self.body)
        return {"file": name}


@dataclass(frozen=True)
class ExchangeRequest:
    """An exchange between devices, which a compiler's process makes itself."""

    exchange: Exchange
    places: ClassVar[tuple[str, ...]] = ()

    @property
    def key(self) -> str:
        """The key of the program: its sizes, and the code that makes it."""
        return f"{asdict(self.exchange)} {_EXCHANGES}"

    def entry(self, folder: Path, name: str) -> dict[str, Any]:
        return {"exchange": asdict(self.exchange)}


_EXCHANGES = inspect.getsource(reduce) + inspect.getsource(replicas)


def export_program(function: Callable[..., Any], specs: Sequence[Any], platform: str = "tpu") -> Exported:
    """Exports `function` of `specs` (trees of shapes) for a platform, with flat arguments and results. Runs
    nothing, and needs no such chip. Raises the errors of `function` while it is traced."""
    leaves, tree = jax.tree.flatten(tuple(specs))

    def flat(*values):
        return tuple(jax.tree.leaves(function(*jax.tree.unflatten(tree, values))))

    # The compiler that reads the module has the version that wrote it.
    unchecked = [export.DisabledSafetyCheck.custom_call(name) for name in _LIBRARY_CALLS]
    jitted = jax.jit(flat, keep_unused=True)
    in_group = any(getattr(leaf, "sharding", None) is not None for leaf in leaves)
    with _EXPORTING, _cudnn_assumed(in_group):
        contents = Contents.of(jitted.trace(*leaves).jaxpr.jaxpr)
        exported = export.export(jitted, platforms=(platform,), disabled_checks=unchecked)(*leaves)
    text = exported.mlir_module()
    places = dict.fromkeys(f"{path}:{line}" for path, line in _PLACE.findall(text))
    key = hashlib.sha256(_LOCATION.sub("", text).encode()).hexdigest()
    body = bytes(exported.serialize())
    return Exported(key, len(body), tuple(places), contents, lambda: body)


_EXPORTING = threading.RLock()
"""`_cudnn_assumed` changes JAX's module, and each compiler's thread may export."""

_LIBRARY_CALLS = (
    "__cudnn$fmhaSoftmax",
    "__cudnn$fmhaSoftmaxBackward",
    "__cudnn$fmhaScaleBiasSoftmax",
    "__cudnn$fmhaScaleBiasSoftmaxBackward",
    "__cudnn$fmhaSoftmaxDropout",
    "__cudnn$fmhaSoftmaxDropoutBackward",
    "__gpu$xla.gpu.triton",
)
"""Which JAX would not export, since another version may have changed them."""


@contextlib.contextmanager
def _cudnn_assumed(in_group: bool) -> Iterator[None]:
    """A context in which JAX lowers its attention without cuDNN and, in a group, without devices.

    JAX asks for the library's version, 1 GB that compiling does not need. And it refuses a mesh without
    devices to every primitive that may have to be partitioned, although inside of `jax.shard_map`, where
    layers of a group run, there is nothing to partition: the lowering puts the kernel's call there. Outside
    of a group it needs a device of this host. JAX versions that do not ask are left alone."""
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
