"""Traces the programs of a step, and exports them for absent chips.

They are those that the engine runs, with shapes instead of arrays. Reads no data and runs nothing. What is
passed to a compiler's process are modules of `jax.export`, without source locations.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from ..chips.catalogue import Chip
from ..data.sources import nbytes as source_bytes
from ..data.stream import batches_in_memory
from ..engine.blueprint import Blueprint, blueprint, tracing
from ..engine.evaluate import evaluation
from ..engine.group_step import GroupStep
from ..engine.layout import Layout
from ..engine.state import TrainState, abstract_model, nbytes
from ..engine.step import Step
from ..models.chip_traits import ChipTraits, depends_on_chip, traced_for
from ..models.remat import inside
from ..recipe import precision
from ..recipe.recipe import Recipe
from ..recipe.source import rows_of, spec_of


@dataclass(frozen=True)
class Traceable:
    """A program to compile for absent chips: `function` of arrays with the shapes `specs`. `donated`: the
    positions of those that it may overwrite."""

    name: str
    function: Callable[..., Any] = field(repr=False, compare=False)
    specs: tuple[Any, ...] = field(repr=False, compare=False)
    donated: tuple[int, ...]
    _traced: dict[ChipTraits | str, Exported] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, name: str, function: Callable[..., Any], specs: tuple[Any, ...], donate: tuple[int, ...] = ()
    ) -> Traceable:
        return cls(name, function, specs, flat_positions(specs, donate))

    @property
    def arguments(self) -> int:
        """The number of arrays."""
        return len(jax.tree.leaves(self.specs))

    def exported(self, chip: Chip, *, one_pass: bool = False) -> Exported:
        """The program for a chip, traced once for all chips for which it is the same. `one_pass`: with
        float32 products in one pass (see `recipe.precision.one_pass`)."""
        kernels = ChipTraits.of(chip)
        if _same_trace(kernels) not in self._traced:
            # a trace that `function`, jitted, may have had has all passes
            function = inspect.unwrap(self.function) if one_pass else self.function
            with traced_for(chip), precision.one_pass() if one_pass else contextlib.nullcontext():
                made = export_program(function, self.specs, kernels.platform)
            self._traced[_same_trace(kernels)] = made
        return self._traced[_same_trace(kernels)]

    def contents(self, chip: Chip) -> Contents:
        """Of the program for a chip, traced unless it was exported."""
        if known := self._traced.get(_same_trace(ChipTraits.of(chip))):
            return known.contents
        with tracing(self.name), traced_for(chip):
            closed = jax.make_jaxpr(self.function)(*self.specs)
        return Contents.of(closed.jaxpr)


def _same_trace(kernels: ChipTraits) -> ChipTraits | str:
    """Equal for chips for which the same program is traced."""
    return kernels if depends_on_chip(kernels.platform) else kernels.platform


TracedStep = Blueprint[Traceable]
"""A step whose programs can be exported for chips that are not here."""


def training_step(
    recipe: Recipe,
    layout: Layout,
    *,
    resident: bool,
    state: TrainState | None = None,
    keeps_evaluation: bool | None = None,
) -> TracedStep:
    """A step of training on one device, or group, of `layout`.

    *Arguments:* `state`: `abstract_state(recipe)`, if known; it is half of the work, and the same in every
    layout; `keeps_evaluation`: whether evaluation data is on the device. Unless None, or in a group of
    several devices, a block of the evaluation is one of the programs, `EVALUATION`.

    Raises `RecipeError` if the recipe's own functions raise an error while they are traced.
    """
    with tracing(recipe.name):
        make: Any = Step if recipe.shards == 1 else GroupStep
        made: Any = blueprint(make(recipe, layout, resident=resident, state=state), apart=True)
    # No compiler is asked about a gradient's squares: they take a small part of the update's time.
    programs = [
        Traceable.of(p.name, p.function, p.specs, p.donate) for p in made.programs if p.name != "square"
    ]
    made = replace(made, programs=tuple(programs))
    if keeps_evaluation is None or recipe.shards > 1:
        return made
    with tracing(recipe.name):
        return _with_evaluation(made, keeps_evaluation)


def _with_evaluation(step: TracedStep, resident: bool) -> TracedStep:
    """`step` and a block of the evaluation, whose data is on the device if `resident`."""
    recipe, source = step.recipe, step.recipe.task.eval
    assert source is not None
    size, block, _ = evaluation(recipe, source)
    columns = rows_of(spec_of(source), size)
    specs = (*abstract_model(recipe), columns, jax.ShapeDtypeStruct((), jnp.int32))
    read = nbytes(columns)
    held = source_bytes(source) if resident else batches_in_memory(step.layout.devices * read) * read
    return replace(
        step,
        programs=(*step.programs, Traceable.of(EVALUATION, block, specs)),
        data_bytes=step.data_bytes + held,
        eval_block=size,
    )


EVALUATION = "evaluation"

# ---- exports

MOST_TRACED = 50
"""Exported programs whose traces JAX may keep: a plan of a small recipe has about three."""
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
    """A program without source locations. `key`: the hash of what it computes; `body`: by `jax.export`;
    `places`: its source lines, "path:line", each once in the program's order."""

    key: str
    body: bytes = field(repr=False)
    places: tuple[str, ...]
    contents: Contents


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
    _EXPORTED.append(key)
    return Exported(key, bytes(exported.serialize()), tuple(places), contents)


_EXPORTED: list[str] = []  # since JAX's caches were cleared


def forget_traces() -> None:
    """Clears JAX's caches if `MOST_TRACED` programs were exported. JAX keeps the trace of each of its own
    functions for each shape as long as the process lives: 1 to 2 MB a plan of another small recipe. What else
    was compiled in this process is compiled again when it is called."""
    with _EXPORTING:
        if len(_EXPORTED) >= MOST_TRACED:
            _EXPORTED.clear()
            jax.clear_caches()


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
