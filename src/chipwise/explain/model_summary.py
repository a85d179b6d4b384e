"""A model's layers: their arrays, what they make of one example, parameters, operations and bytes.

Nothing is computed: the model is traced. A product or convolution belongs to the layer whose parameter it
reads; those of two activations, such as attention's scores, belong to no layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from rich.console import RenderableType

from ..chips import named
from ..engine import keys
from ..engine.program_flops import called_by, equation_flops
from ..engine.state import abstract_model
from ..models.chip_traits import traced_for
from ..recipe import precision
from ..recipe.recipe import Recipe
from ..recipe.source import rows_of, spec_of
from ..recipe.task import by_path
from ..words.facts import plain
from ..words.figures import byte_size, short
from .terminal import table

_REST = "(without parameters)"


@dataclass
class Layer:
    """A layer of the model.

    *Fields:* `arrays`, name to shape of its parameters; `output`, the shape of the last thing that it made
    of one example, without the batch axis, or `None`; `parameters`, their number; `bytes` of them as stored;
    `flops`, of its products and convolutions for one example, forward.
    """

    name: str
    arrays: dict[str, tuple[int, ...]] = field(default_factory=dict)
    output: tuple[int, ...] | None = None
    parameters: int = 0
    bytes: int = 0
    flops: float = 0.0


def layers(recipe: Recipe) -> list[Layer]:
    """The layers of `recipe`'s model in the order of its parameters, then what needs none. Traces `predict`,
    or the loss of evaluation where the task has none. Raises what the task's functions raise."""
    task = recipe.task
    params, state = abstract_model(recipe)
    example = rows_of(spec_of(task.train), 1)
    key = jax.eval_shape(lambda: keys.eval_key(recipe.seed))

    def run(params, state, batch, key):
        with precision.products(recipe.precision):
            batch = precision.cast_batch(batch, recipe.precision)
            params = precision.cast(params, recipe.precision)
            if task.predict is None:
                return {n: s.total for n, s in task.loss(params, state, batch, key, False)[0].items()}
            return task.predict(params, state, {n: c for n, c in batch.items() if n != "label"})

    with traced_for(named("t4")):  # as written: no kernels, nor convolutions cut up for a CPU
        jaxpr = jax.make_jaxpr(run)(params, state, example, key).jaxpr
    leaves = by_path(params)
    found: dict[str, Layer] = {}
    for path, leaf in leaves.items():
        name, _, own = path.rpartition("/")
        layer = found.setdefault(name or path, Layer(name or path))
        layer.arrays[own] = tuple(leaf.shape)
        layer.parameters += math.prod(leaf.shape)
        layer.bytes += math.prod(leaf.shape) * leaf.dtype.itemsize
    names = [path.rpartition("/")[0] or path for path in leaves] + [""] * len(jax.tree.leaves(state))
    owner = dict(zip(jaxpr.invars, names))  # noqa: B905 (the batch and the key follow)
    found[_REST] = Layer(_REST)
    _walk(jaxpr, owner, found, 1)
    return [layer for layer in found.values() if layer.parameters or layer.flops]


def _walk(jaxpr: Any, owner: dict[Any, str], found: dict[str, Layer], times: int) -> None:
    """Adds the operations of `jaxpr`, which runs `times` times. *Arguments:* `owner`: the layer of each value
    that was made of parameters alone, "" of one made of the state or of constants; grows."""
    owner |= dict.fromkeys(jaxpr.constvars, "")
    for equation in jaxpr.eqns:
        variables = [v for v in equation.invars if not hasattr(v, "val")]
        owners = [owner[v] for v in variables if v in owner]
        of = next(filter(None, owners), "")
        inner = list(called_by(equation))[:1]  # of branches, the first
        for called, arguments, more in inner:
            within = {
                v: "" if hasattr(given, "val") else owner[given]
                for v, given in zip(called.invars, arguments, strict=False)
                if hasattr(given, "val") or given in owner
            }
            _walk(called, within, found, times * more)
        made = equation.outvars[0].aval
        if len(owners) == len(variables):  # such as a cast or a transposition of parameters
            owner |= dict.fromkeys(equation.outvars, of)
        elif not inner and hasattr(made, "shape"):
            layer = found[of or _REST]
            layer.flops += times * equation_flops(equation)
            layer.output = tuple(made.shape[1:]) if of else None


def to_json(found: list[Layer]) -> list[Mapping[str, Any]]:
    """The layers as plain JSON values."""
    return [plain(layer) for layer in found]


def parts(recipe: Recipe, found: list[Layer]) -> Iterator[RenderableType]:
    """What to print: a row a layer, and the sums."""
    many, flops = sum(layer.parameters for layer in found), sum(layer.flops for layer in found)
    size = sum(layer.bytes for layer in found)
    rows = [
        (
            layer.name, ", ".join(f"{n} {_shape(s)}" for n, s in layer.arrays.items()), _shape(layer.output),
            f"{layer.parameters:,}", short(layer.flops), byte_size(layer.bytes),
        )
        for layer in found
    ]  # fmt: skip
    columns = ("layer", "arrays", "output", "parameters", "FLOPs", "bytes")
    rows.append(("all", "", "", f"{many:,}", short(flops), byte_size(size)))
    yield table(columns, rows, left=columns[:3], fold=columns[:3])
    each = f"one example, forward; a training step of {recipe.batch:,} takes about three times as many each"
    yield f"FLOPs: of products and convolutions, {each}."


def _shape(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else "×".join(map(str, shape)) or "1"
