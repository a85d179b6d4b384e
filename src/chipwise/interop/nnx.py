"""Train a Flax NNX module: `cw.nnx.task(lambda rngs: Net(rngs=rngs), loss, train=data)`.

`functional` gives the two plain functions behind it, for a loss that needs more than outputs and
target.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from ..base import RecipeError, invalid
from ..base.annotations import as_annotated
from ..models.large import SHARD
from ..recipe import freezing
from ..recipe.task import Task
from .adapter import (
    Arguments,
    Data,
    Judging,
    Source,
    fitting,
    nested,
    not_a_model,
    stated,
    with_loss,
)
from .modes import Mode, check_alike, in_mode, modes_of, parameters, read_modes

#: Nested dictionaries with string keys and arrays as leaves.
Tree = dict[str, Any]
_EXPECTED = "a function of nnx.Rngs that makes an nnx.Module: lambda rngs: Net(rngs=rngs)"
Maker = Annotated[Callable[[nnx.Rngs], nnx.Module], _EXPECTED]


@as_annotated
def task(
    make_model: Maker,
    loss: Judging,
    *,
    mode: Mode | None = None,
    train: Source,
    eval: Source | None = None,
    inputs: Any = None,
    target: Any = "label",
    metrics: Mapping[str, Callable] | None = None,
    augment: Callable | None = None,
    mix: Callable | None = None,
    classes: int | None = None,
    better: Mapping[str, str] = {},
    eval_group: int = 1,
) -> Task:
    """Makes a `Task` of a Flax NNX module and a loss.

    *Arguments:*

    - `make_model`: as in `functional`.
    - `loss`: `(outputs, target)`. It returns values `(batch,)`, their mean, or a `Sum`.
    - `mode`: as in `cw.linen.task`, for arguments of the module's `__call__`. Its layers are set by
      its methods `train` and `eval`.
    - The others: as in `interop.adapter.Data`.

    The module is called with one argument, or with several through `inputs`. With `shards`,
    parameters are sharded by the module's annotations, see `sharding`.

    Raises `RecipeError` as `functional` does, if the data lacks a column, and as `cw.linen.task`
    does for an argument that nothing sets.
    """
    init, call = _functions(make_model, mode)

    def forward(*given):
        return *call(*given), None

    with nnx.use_eager_sharding(False):
        kind = type(nnx.eval_shape(lambda: make_model(nnx.Rngs(0))))
    name, known = kind.__name__, parameters(kind)
    modes = modes_of(name, known, mode)
    columns = Data(train, eval, inputs, target, metrics, augment, mix, classes, better, eval_group)
    built = columns.task("nnx", name, init, with_loss(forward, loss, name))
    built = dataclasses.replace(built, sharding=sharding(make_model))
    read = read_modes(name, built, known, modes, columns, forward, mode is not None)
    return stated(built, name, loss, read)


@as_annotated
def sharding(make_model: Maker) -> Callable[[str], PartitionSpec | None]:
    """The value for `Task(sharding=...)`, from the module's own `nnx.with_partitioning(initializer,
    (None, "shard"))` or similar annotations.

    *Returns* a function from a parameter's path to its `PartitionSpec`, or None if it names no axis
    `"shard"`. Other axis names belong to other meshes and are ignored.
    """
    specs = {}
    for path, variable in nnx.to_flat_state(_abstract(make_model)[1]["params"]):
        names = variable.get_metadata().get("out_sharding") or ()
        if SHARD in names:
            specs[_name(path)] = PartitionSpec(*(n if n == SHARD else None for n in names))
    return specs.get


@as_annotated
def functional(make_model: Maker) -> tuple[Callable, Callable]:
    """`init` and `apply` of the module that `make_model(rngs)` builds.

    `init(key) -> (params, state)`: `params` has the `nnx.Param` variables. `state` has all others
    (such as batch statistics) except random streams, and may be `{}`. Both are nested dictionaries
    with string keys.

    `apply(params, state, x, key, train) -> (outputs, new_state)`: calls the module on `x` in
    training mode (`train=True`, a Python bool) or evaluation mode, where `new_state` is `state`
    itself. Dropout and any other random layer draw from `key`, a stream for each layer. In
    evaluation mode `key` may be None unless a layer still draws. `apply` is pure, so jit, grad,
    vmap and shard_map accept it.

    >>> from flax import nnx
    >>> init, apply = functional(lambda rngs: nnx.Linear(3, 2, rngs=rngs))
    >>> params, state = init(jax.random.key(0))
    >>> apply(params, state, jax.numpy.ones((4, 3)), None, False)[0].shape
    (4, 2)

    Raises:
        RecipeError: `make_model` is not a function of one `nnx.Rngs` that returns an
            `nnx.Module`, or `params` or `state` are not those of the model.
    """
    init, call = _functions(make_model)

    def apply(params: Tree, state: Tree, x, key, train: bool):
        return call(params, state, Arguments((x,)), key, train)

    return init, apply


def module_of(init: Callable) -> nnx.Module | None:
    """The module that has the function `init`, also with other initial weights, with shapes in
    place of arrays. None for the functions of other models."""
    make_model = getattr(inspect.unwrap(init), "make_model", None)
    if make_model is None:
        return None
    with nnx.use_eager_sharding(False):
        return nnx.eval_shape(lambda: make_model(nnx.Rngs(0)))


@as_annotated
def decoder(make_model: Maker) -> Callable:
    """The value for `Task(decode=...)` of a module with a method `decode(tokens, cache, position)`,
    which returns logits and the next cache."""
    functions = functools.cache(lambda: _functions(make_model))

    def decode(params: Tree, state: Tree, tokens, cache, position):
        return functions()[1](
            params, state, Arguments((tokens, cache, position)), None, False, "decode"
        )[0]

    return decode


def _functions(
    make_model: Callable, mode: str | Mapping[str, bool] | None = None
) -> tuple[Callable, Callable]:
    """Like `functional`, for modules with any arguments: `call(params, state, given, key,
    train)`."""
    if isinstance(make_model, nnx.Module):
        raise not_a_model("nnx", type(make_model).__name__, _EXPECTED)
    graphs, shapes = _abstract(make_model)
    # NNX modules ask for them
    holding = functools.cache(lambda patterns: _abstract(make_model)[0][True])

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        with nnx.use_eager_sharding(False):
            model = make_model(nnx.Rngs(key))
        _, params, _, state = nnx.split(model, nnx.Param, nnx.RngState, ...)  # type: ignore[misc]
        return _to_tree(params), _to_tree(state)

    init.make_model = make_model  # type: ignore[attr-defined]

    def call(params: Tree, state: Tree, given: Arguments, key, train: bool, method="__call__"):
        if not isinstance(train, bool):
            expected = "True or False; under jax.jit name it in static_argnames"
            raise invalid("nnx-train-no-bool", "train", train, expected)
        parts = [
            _from_tree("params", params, shapes["params"]),
            _streams(shapes["rng"], key, train),
            _from_tree("state", state, shapes["state"]),
        ]
        patterns = freezing.patterns() if train else ()
        model = nnx.merge(holding(patterns) if patterns else graphs[train], *parts)
        if method == "__call__":
            kind = type(model)
            flags, given = in_mode(modes_of(kind.__name__, parameters(kind), mode), given, train)
            given = given._replace(kwargs={**given.kwargs, **flags})
        outputs = getattr(model, method)(*given.args, **given.kwargs)
        if not train:
            return outputs, state
        _, _, _, new_state = nnx.split(model, nnx.Param, nnx.RngState, ...)  # type: ignore[misc]
        return outputs, _to_tree(new_state)

    return init, call


def _abstract(make_model):
    """The model's graph in both modes and its variables' shapes, without computing anything."""

    def build():
        model = make_model(nnx.Rngs(0))
        if not isinstance(model, nnx.Module):
            raise not_a_model("nnx", f"a function that returns a {type(model).__name__}", _EXPECTED)
        return model

    with nnx.use_eager_sharding(False):  # `sharding` reads the annotations for a mesh
        model = nnx.eval_shape(build)
    check_alike(
        type(model).__name__,
        {
            _name(path): not getattr(part, name)
            for path, part in nnx.iter_modules(model)
            for name in ("deterministic", "use_running_average")
            if isinstance(getattr(part, name, None), bool)
        },
    )
    graphs: dict[bool, nnx.GraphDef] = {}
    for train in (True, False):
        (model.train if train else model.eval)()
        if train:
            _hold(model)
        graphs[train], params, rng, state = nnx.split(  # type: ignore[misc]
            model, nnx.Param, nnx.RngState, ...
        )
    return graphs, {"params": params, "rng": rng, "state": state}


def _hold(model: nnx.Module) -> None:
    """Puts batch norm with frozen statistics in evaluation mode."""
    for path, module in nnx.iter_modules(model):
        statistics = [
            name for name, held in vars(module).items() if isinstance(held, nnx.BatchStat)
        ]
        if freezing.holds(_name((*path, name)) for name in statistics):
            module.use_running_average = True  # type: ignore[attr-defined]


def _name(path: tuple) -> str:
    return "/".join(map(str, path))  # list indices become strings, as checkpoints need


def _to_tree(state: nnx.State) -> Tree:
    return nested({_name(path): variable[...] for path, variable in nnx.to_flat_state(state)}, "/")


def _from_tree(kind: str, tree: Tree, like: nnx.State) -> nnx.State:
    """The arrays of `tree` in the variables of `like`."""
    flat = nnx.to_flat_state(like)
    given = fitting(tree, "/", {_name(path): variable.shape for path, variable in flat}, kind)
    return nnx.from_flat_state(
        [(path, variable.replace(given[_name(path)])) for path, variable in flat]
    )


def _streams(like: nnx.State, key, train: bool) -> nnx.State:
    """Random streams for the model, each with its own key folded from `key`, all counts at zero.

    NNX copies a stream with its key into each layer, so two dropouts would draw the same mask. So
    the key is folded with the stream's number.
    """
    flat = nnx.to_flat_state(like)
    if key is None:
        if flat and train:
            raise RecipeError(
                "nnx-key-missing", layers=sorted({_name(path[:-1]) for path, _ in flat})
            )
        key = jax.random.key(0)
    variables: list = []
    streams: dict = {}
    for path, variable in flat:
        if jax.numpy.issubdtype(variable.dtype, jax.dtypes.prng_key):
            value = jax.random.fold_in(key, streams.setdefault(path, len(streams)))
        else:
            value = jax.numpy.zeros(variable.shape, variable.dtype)
        variables.append((path, variable.replace(value)))
    return nnx.from_flat_state(variables)
