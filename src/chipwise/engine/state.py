"""The training state: its parts and their roles, how it begins, and the fingerprint of its parameters."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..data.sources import Spec, spec_of
from ..errors import RecipeError, near
from ..models.large import axes
from ..recipe.recipe import Recipe
from ..recipe.task import Task, Tree, by_path
from ..recipe.user_code import user_code
from . import keys, scaling
from .flat import Cut, Flat
from .freeze import split, whole_params
from .program_digest import digest
from .replica import sums_of

_NONE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Role:
    """How a part of the state is used.

    *Fields:* `differentiated`: the loss is differentiated by it; `summed`: the replicas' contributions to it
    are added; `donated`: the update overwrites it; `saved`: checkpoints contain it.
    """

    differentiated: bool = False
    summed: bool = False
    donated: bool = True
    saved: bool = True


ROLES = {
    "step": Role(),
    "params": Role(differentiated=True, summed=True),
    "frozen": Role(donated=False),
    "state": Role(summed=True),
    "optimizer": Role(),
    "ema": Role(),
    "sums": Role(summed=True),
    "scale": Role(),
}
"""The role of each part of `TrainState`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state that a run passes from one step to the next.

    *Fields:*

    - `step` `()` int32: the steps done, which is also the position in the data.
    - `params`, the trained parameters, and `frozen`, the others: two trees that `whole_params` joins. On the
      devices, `params` is the vector of `flat_of`, which each replica unpacks.
    - `state` of the task.
    - `optimizer`: the optimizer's state for that vector, or for the tree if the optimizer uses whole leaves.
    - `ema`, `(size,)`: the average of that vector, or `None`.
    - `sums`, a dict of `Sum`: the training metrics since they were last logged.
    - `scale` of the loss in `f16` (see `engine.scaling`), or `None`.
    """

    step: jax.Array
    params: Tree
    frozen: Tree
    state: Tree
    optimizer: Tree
    ema: Tree
    sums: dict[str, Any]
    scale: Tree = None

    def without(self, trait: str) -> TrainState:
        """The state with `None` for each part whose role lacks `trait`."""
        removed: dict[str, Any] = {name: None for name, role in ROLES.items() if not getattr(role, trait)}
        return dataclasses.replace(self, **removed)


def first_maker(
    recipe: Recipe, then: Callable[[TrainState], Any] = lambda state: state, **options: Any
) -> Any:
    """`init_state` of `recipe`, jitted, as a function of `seed` and `given`.

    *Arguments:* `then`, a function of the state in the same program; `options` of `jax.jit`.
    """
    example = spec_of(recipe.task.train)
    return jax.jit(lambda seed, given: then(init_state(recipe, example, seed, given)), **options)


def first_digest(recipe: Recipe) -> str:
    """The digest of the program that makes the first state, whatever the seed."""
    return digest([jax.make_jaxpr(first_maker(recipe))(np.uint32(0), from_data(recipe.task))])


def first_state(recipe: Recipe, make: Any = None, alike: Callable[[Tree], Tree] = lambda t: t) -> TrainState:
    """`init_state` on the default device.

    *Arguments:* `make`: a `first_maker` of `recipe`, or of a recipe that differs only in seed and schedules,
    so that nothing is compiled again; `alike`: makes the arrays that hosts computed from the data equal,
    since processors may round differently.
    """
    return (make or first_maker(recipe))(np.uint32(recipe.seed), from_data(recipe.task, alike))


def from_data(task: Task, alike: Callable[[Tree], Tree] = lambda t: t) -> dict[str, Any]:
    """The parameters that `Task.from_data` computes from the training data, as NumPy arrays by path.
    *Arguments:* see `first_state`."""
    given = {} if task.from_data is None else dict(task.from_data(task.train))
    return alike(jax.tree.map(np.asarray, given)) if given else {}


def abstract_state(recipe: Recipe) -> TrainState:
    """The training state of `recipe` as shapes and types."""
    return jax.eval_shape(lambda: init_state(recipe, spec_of(recipe.task.train)))


def abstract_model(recipe: Recipe) -> tuple[Tree, Tree]:
    """What `Task.init` of `recipe` makes, the parameters and the state, as shapes and types."""

    def make() -> tuple[Tree, Tree]:
        params, state = recipe.task.init(keys.init_key(recipe.seed))
        return jax.tree.map(jnp.asarray, params), state

    return jax.eval_shape(make)


def init_state(
    recipe: Recipe, example: Spec, seed: jax.Array | None = None, given: Mapping[str, Any] = _NONE
) -> TrainState:
    """The state before the first step. Traced or not.

    *Arguments:* `example`, column to `ShapeDtypeStruct`, one unbatched example; `seed` `()` uint32, by
    default the recipe's; `given`, path to a parameter that replaces the task's. Raises `RecipeError` if
    `init` or `loss` does not keep the contract of `Task`, or all is frozen.
    """
    key = keys.init_key(recipe.seed if seed is None else seed)
    with user_code("Task.init"):
        pair = recipe.task.init(key)
    if not (isinstance(pair, tuple) and len(pair) == 2):
        raise RecipeError("init-returns", got=type(pair).__name__)
    state = jax.tree.map(jnp.asarray, pair[1])
    whole = replaced(jax.tree.map(jnp.asarray, pair[0]), given)
    params, frozen = split(whole, recipe.held, state, recipe.adapters, key)
    flat = flat_of(recipe, params)
    first = TrainState(
        step=jnp.int32(0),
        params=params,
        frozen=frozen,
        state=state,
        optimizer=recipe.optimizer.init(flat.pack(params) if recipe.optimizer.elementwise else params),
        ema=flat.pack(params) if recipe.ema is not None else None,
        sums={},
        scale=scaling.first() if recipe.precision == "f16" else None,
    )
    shapes = sums_of(recipe, read(first), example)
    return dataclasses.replace(first, sums=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


def replaced(params: Tree, given: Mapping[str, Any]) -> Tree:
    """`params` with the arrays of `given` at their paths. Raises `RecipeError` for an unknown path or another
    shape."""
    if not given:
        return params
    leaves = by_path(params)
    for name, value in given.items():
        if name not in leaves:
            names = list(leaves)
            raise RecipeError("from-data-unknown", path=name, near=near(name, names), names=names)
        shape, expected = list(jnp.shape(value)), list(leaves[name].shape)
        if shape != expected:
            raise RecipeError("from-data-shape", path=name, shape=shape, expected=expected)
        leaves[name] = jnp.asarray(value).astype(leaves[name].dtype)
    return jax.tree.unflatten(jax.tree.structure(params), list(leaves.values()))


def read(state: TrainState) -> tuple[Tree, Tree, Tree, jax.Array, Tree]:
    """The parts of the training state that a replica reads; fewer arguments make a call faster."""
    return state.params, state.frozen, state.state, state.step, state.scale


def flat_of(recipe: Recipe, params: Tree) -> Any:
    """The layout of the trained parameters in the vector that the update changes: `replicas` chunks, in
    float32 or the widest parameter's dtype; a `Flat`, or a `Cut` if the recipe has `shards`. Raises
    `RecipeError` for a parameter that is not floating."""
    dtypes = [jnp.dtype(leaf.dtype) for leaf in jax.tree.leaves(params)]
    wrong = sorted({str(dtype) for dtype in dtypes if not jnp.issubdtype(dtype, jnp.floating)})
    if wrong:
        raise RecipeError("parameter-without-gradient", dtypes=wrong)
    widest = max([jnp.dtype(jnp.float32), *dtypes], key=lambda dtype: dtype.itemsize)
    if recipe.shards == 1:
        return Flat(params, recipe.replicas, widest)
    return Cut(params, axes_of(recipe, params), recipe.shards, recipe.replicas, widest)


def axes_of(recipe: Recipe, params: Tree, *, some: bool = True) -> Tree:
    """The axis along which each of `params` is cut, or -1: see `models.large`. The task knows no adapters."""
    own = recipe.task.sharding

    def sharding(path: str) -> PartitionSpec | None:
        return None if own is None or path.endswith(("/lora_a", "/lora_b")) else own(path)

    return axes(params, recipe.shards, sharding, some=some)


def parameters(recipe: Recipe, state: TrainState, *, averaged: bool = False) -> Tree:
    """All parameters of a state of NumPy arrays as the task's tree; with `averaged` their average, if the
    recipe has an EMA."""
    return whole_params(trained_part(recipe, state, averaged=averaged), state.frozen)


def trained_part(recipe: Recipe, state: TrainState, *, averaged: bool) -> Tree:
    """`params` of a state, or their average, as in `parameters`: adapters are apart."""
    if averaged and recipe.ema is not None:
        return flat_of(recipe, state.params).widened().unpack(state.ema)
    return state.params


def fingerprint(params: Tree) -> str:
    """SHA-256 of the parameters' bytes, leaf by leaf in JAX's tree order (dict keys sorted)."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return digest.hexdigest()


class NotFinite(ArithmeticError):
    """A run's loss or parameters are no longer finite: `code` of the `DivergedError`, `step` and `value`."""

    def __init__(self, code: str, step: int, value: float):
        super().__init__(code)
        self.code, self.step, self.value = code, step, value


def finite(params: Tree) -> bool:
    """Whether no value is NaN or infinite."""
    return all(
        bool(jnp.isfinite(leaf).all()) if isinstance(leaf, jax.Array) else bool(np.all(np.isfinite(leaf)))
        for leaf in jax.tree.leaves(params)
    )


def count(params: Tree) -> int:
    """The number of parameters."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))


def nbytes(tree: Tree) -> int:
    """The bytes of a tree of arrays or shapes on one device. Random keys count as their data."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        over = getattr(leaf, "sharding", None)
        shape = leaf.shape if over is None else over.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total
