"""A model's layers: their arrays, their output for one example, parameters, operations and bytes.

The model is only traced: nothing is computed. A product or convolution belongs to the layer whose
parameter it reads. A product of two activations, such as attention's scores, belongs to no layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from rich.console import RenderableType

from ..base.figures import byte_size, short
from ..chips import named
from ..models.chip_traits import traced_for
from ..recipe import precision
from ..recipe.random_keys import as_keys
from ..recipe.recipe import Recipe
from ..recipe.source import rows_of, spec_of
from ..recipe.task import by_path
from ..step import keys
from ..step.program_flops import called_by, equation_flops
from ..step.state import abstract_model
from .terminal import table

_REST = "(without parameters)"


@dataclass
class Layer:
    """A layer of the model."""

    name: str
    arrays: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The name and shape of each parameter."""
    output: tuple[int, ...] | None = None
    """The shape of the layer's last output for one example, without the batch axis, or `None`."""
    parameters: int = 0
    """The number of parameters."""
    bytes: int = 0
    """The size of the parameters as stored."""
    flops: float = 0.0
    """The operations of products and convolutions for one example, forward."""
    rules: dict[str, str] = field(default_factory=dict)
    """The name of each array and the rule that updates it, for an optimizer with several rules
    (`Optimizer.kinds`)."""


def layers(recipe: Recipe) -> list[Layer]:
    """The layers of `recipe`'s model in the order of its parameters, then the operations that need
    none. Traces `predict`, or the evaluation loss if the task has none. Raises what the task's
    functions raise."""
    task = recipe.task
    params, state = abstract_model(recipe)
    example = rows_of(spec_of(task.train), 1)
    key = jax.eval_shape(lambda: keys.init_key(recipe.seed))

    def run(params, state, batch, key):
        with precision.products(recipe.precision):
            batch = precision.cast_batch(batch, recipe.precision, task.uncast)
            params, state = as_keys((precision.cast(params, recipe.precision), state))
            if task.predict is None:
                return {
                    n: s.total for n, s in task.loss(params, state, batch, key, False)[0].items()
                }
            return task.predict(params, state, {n: c for n, c in batch.items() if n != "label"})

    with traced_for(named("t4")):  # as written: no kernels, nor convolutions cut up for a CPU
        jaxpr = jax.make_jaxpr(run)(params, state, example, key).jaxpr
    leaves = by_path(params)
    kinds = recipe.optimizer.kinds(params)
    rules = {} if kinds is None else by_path(kinds)
    found: dict[str, Layer] = {}
    for path, leaf in leaves.items():
        name, _, own = path.rpartition("/")
        layer = found.setdefault(name or path, Layer(name or path))
        layer.arrays[own] = tuple(leaf.shape)
        if path in rules:
            layer.rules[own] = rules[path]
        layer.parameters += math.prod(leaf.shape)
        layer.bytes += math.prod(leaf.shape) * leaf.dtype.itemsize
    names = [path.rpartition("/")[0] or path for path in leaves] + [""] * len(
        jax.tree.leaves(state)
    )
    owner = dict(zip(jaxpr.invars, names))  # noqa: B905 (the batch and the key follow)
    found[_REST] = Layer(_REST)
    _walk(jaxpr, owner, found, 1)
    return [layer for layer in found.values() if layer.parameters or layer.flops]


def _walk(jaxpr: Any, owner: dict[Any, str], found: dict[str, Layer], times: int) -> None:
    """Adds the operations of `jaxpr`, which runs `times` times. *Arguments:* `owner`: the layer of
    each value that depends only on parameters, model state and constants, or "" if no parameter is
    among them. The function adds to it."""
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


def parts(recipe: Recipe, found: list[Layer]) -> Iterator[RenderableType]:
    """What to print: a row for each layer, and the sums."""
    many = sum(layer.parameters for layer in found)
    flops = sum(layer.flops for layer in found)
    size = sum(layer.bytes for layer in found)
    rows: list[tuple[str, ...]] = [
        (
            layer.name,
            ", ".join(f"{n} {_shape(s)}" for n, s in layer.arrays.items()),
            _shape(layer.output),
            f"{layer.parameters:,}",
            short(layer.flops),
            byte_size(layer.bytes),
        )
        for layer in found
    ]
    rows.append(("all", "", "", f"{many:,}", short(flops), byte_size(size)))
    words = ["layer", "arrays", "output"]
    columns = [*words, "parameters", "FLOPs", "bytes"]
    if any(layer.rules for layer in found):
        columns.append("moved by")
        words.append("moved by")
        rows = [(*row, rule) for row, rule in zip(rows, [*map(_rule, found), ""], strict=True)]
    yield table(columns, rows, left=words, fold=words)
    each = (
        f"one example, forward; a training step of {recipe.batch:,} takes about three "
        f"times as many each"
    )
    yield f"FLOPs: of products and convolutions, {each}."


def _rule(layer: Layer) -> str:
    """`muon`, or `kernel muon, bias adam` if the rules differ."""
    if len(set(layer.rules.values())) == 1:
        return next(iter(layer.rules.values()))
    return ", ".join(f"{name} {rule}" for name, rule in layer.rules.items())


def _shape(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else "×".join(map(str, shape)) or "1"
