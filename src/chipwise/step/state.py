"""Defines the training state: its parts and their roles, its first values, and the fingerprint of
its parameters."""

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
from jax import Array
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from ..base import RecipeError, near
from ..data.sources import Spec, spec_of
from ..machine.portable_cpu import everywhere
from ..models.large import axes
from ..recipe.random_keys import as_data, has_keys, is_key
from ..recipe.recipe import Recipe
from ..recipe.task import Sum, Task, Tree, by_path
from ..recipe.user_code import user_code
from . import keys, scaling
from .flat import Cut, Flat
from .freeze import split, whole_params
from .program_digest import digest
from .replica import traced_loss

_NONE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Role:
    """The uses of a part of the state."""

    differentiated: bool = False
    """The loss is differentiated with respect to the part."""
    summed: bool = False
    """The replicas' contributions to the part are added."""
    donated: bool = True
    """The update overwrites the part."""
    saved: bool = True
    """Checkpoints contain the part."""


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
    """The state that a run passes from one step to the next."""

    step: Array
    """`()` int32: the number of steps done, which is also the position in the data."""
    params: Tree
    """The trained parameters, as a tree. On the devices they are the vector of `flat_of`, which
    each replica unpacks."""
    frozen: Tree
    """The other parameters, as a tree. `whole_params` joins the two trees."""
    state: Tree
    """The task's state."""
    optimizer: Tree
    """The optimizer's state for the vector of `flat_of`, or for the tree if the optimizer uses
    whole leaves."""
    ema: Array | None
    """`(size,)`: the average of the vector of `flat_of`, or `None`."""
    sums: dict[str, Sum]
    """The training metrics since they were last logged."""
    scale: dict[str, Array] | None = None
    """The scale of the loss in `f16` (see `step.scaling`), or `None`."""

    def without(self, trait: str) -> TrainState:
        """Returns the state with `None` for each part whose role lacks `trait`."""
        removed: dict[str, Any] = {
            name: None for name, role in ROLES.items() if not getattr(role, trait)
        }
        return dataclasses.replace(self, **removed)

    def with_frozen(self, frozen: Tree) -> TrainState:
        """Returns the state with another frozen part. A loop asks twice a step."""
        return self if frozen is self.frozen else dataclasses.replace(self, frozen=frozen)


def first_maker(
    recipe: Recipe, then: Callable[[TrainState], Tree] = lambda state: state, **options: Any
) -> jax.stages.Wrapped:
    """Returns `init_state` of `recipe`, jitted, as a function of `seed` and `given`.

    *Arguments:* `then` is a function of the state, applied in the same program. `options` are those
    of `jax.jit`.
    """
    example = spec_of(recipe.task.train)
    made = everywhere(lambda seed, given: then(init_state(recipe, example, seed, given)))
    return jax.jit(made, **options)


def first_digest(recipe: Recipe) -> str:
    """The digest of the program that computes the first state. It does not depend on the seed."""
    return digest([jax.make_jaxpr(first_maker(recipe))(np.uint32(0), from_data(recipe.task))])


def first_state(
    recipe: Recipe,
    make: Callable[..., TrainState] | None = None,
    alike: Callable[[Tree], Tree] = lambda t: t,
) -> TrainState:
    """Returns the first state (see `init_state`) on the default device.

    *Arguments:* `make` is a `first_maker` of `recipe`, or of a recipe that differs only in seed and
    schedules, so that nothing is compiled again. `alike` equalizes the arrays that hosts computed
    from the data, since processors may round differently.
    """
    return (make or first_maker(recipe))(np.uint32(recipe.seed), from_data(recipe.task, alike))


def from_data(task: Task, alike: Callable[[Tree], Tree] = lambda t: t) -> dict[str, Any]:
    """The parameters that `Task.from_data` computes from the training data, as NumPy arrays by
    path.

    *Arguments:* `alike` is as in `first_state`."""
    given = {} if task.from_data is None else dict(task.from_data(task.train))
    return alike(jax.tree.map(np.asarray, given)) if given else {}


def abstract_state(
    recipe: Recipe, told: Callable[[ClosedJaxpr], object] = lambda loss: None
) -> TrainState:
    """The training state of `recipe` as shapes and types. See `init_state`."""
    return jax.eval_shape(lambda: init_state(recipe, spec_of(recipe.task.train), told=told))


def abstract_model(recipe: Recipe) -> tuple[Tree, Tree]:
    """The parameters and the state that `Task.init` of `recipe` returns, as shapes and types.
    Random keys are their `KeyData`."""

    def make() -> tuple[Tree, Tree]:
        params, state = recipe.task.init(keys.init_key(recipe.seed))
        return as_data((jax.tree.map(jnp.asarray, params), state))

    return jax.eval_shape(make)


def init_state(
    recipe: Recipe,
    example: Spec,
    seed: Array | None = None,
    given: Mapping[str, Any] = _NONE,
    told: Callable[[ClosedJaxpr], object] = lambda loss: None,
) -> TrainState:
    """Returns the state before the first step. Traced or not.

    *Arguments:* `example` maps each column to a `ShapeDtypeStruct`, that of one unbatched example.
    `seed` is `()` uint32, by default the recipe's. `given` maps paths to parameters that replace
    the task's. `told` gets the loss of `traced_loss`.

    Raises `RecipeError` if `init` or `loss` does not keep the contract of `Task`, or if all
    parameters are frozen.
    """
    key = keys.init_key(recipe.seed if seed is None else seed)
    with user_code("Task.init"):
        pair = recipe.task.init(key)
    if not (isinstance(pair, tuple) and len(pair) == 2):
        raise RecipeError("init-returns", got=type(pair).__name__)
    state = jax.tree.map(jnp.asarray, pair[1])
    for path, leaf in by_path(state).items():
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise RecipeError("state-complex", path=path, dtype=str(leaf.dtype))
    whole = replaced(jax.tree.map(jnp.asarray, pair[0]), given)
    params, frozen = split(whole, recipe.held, state, recipe.adapters, key)
    frozen, state = as_data((frozen, state))
    flat = flat_of(recipe, params)
    moments = recipe.optimizer.init(flat.pack(params) if recipe.optimizer.elementwise else params)
    if recipe.optimizer.elementwise and has_keys(moments):
        raise RecipeError("elementwise-with-keys", optimizer=repr(recipe.optimizer))
    first = TrainState(
        step=jnp.int32(0),
        params=params,
        frozen=frozen,
        state=state,
        optimizer=moments,
        ema=flat.pack(params) if recipe.ema is not None else None,
        sums={},
        scale=scaling.first() if recipe.precision == "f16" else None,
    )
    loss, shapes = traced_loss(recipe, first, example)
    told(loss)
    return dataclasses.replace(
        first, sums=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    )


def refuse_part(recipe: Recipe, params: Tree) -> None:
    """Raises `RecipeError` if PyTorch's optimizer holds fewer parameters than the task trains."""
    held = recipe.optimizer.held_values
    trained = sum(leaf.size for leaf in jax.tree.leaves(params))
    whole = recipe.task.framework == "torch" and recipe.adapters is None
    if whole and held is not None and held < trained:
        raise RecipeError("torch-optimizer-part", held=held, trained=trained)


def replaced(params: Tree, given: Mapping[str, Any]) -> Tree:
    """Returns `params` with the arrays of `given` at their paths. Raises `RecipeError` for an
    unknown path or another shape."""
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


def flat_of(recipe: Recipe, params: Tree) -> Flat | Cut:
    """The layout of the trained parameters in the vector that the update changes. The vector has
    `replicas` chunks, and the dtype float32 or that of the widest parameter. The layout is a
    `Flat`, or a `Cut` if the recipe has `shards`. Raises `RecipeError` for a parameter that is not
    floating."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(params)]
    wrong = sorted({str(dtype) for dtype in dtypes if not jnp.issubdtype(dtype, jnp.floating)})
    if wrong:
        raise RecipeError("parameter-without-gradient", dtypes=wrong)
    widest = max([jnp.dtype(jnp.float32), *dtypes], key=lambda dtype: dtype.itemsize)
    if recipe.shards == 1:
        return Flat(params, recipe.replicas, widest)
    return Cut(params, axes_of(recipe, params), recipe.shards, recipe.replicas, widest)


def axes_of(recipe: Recipe, params: Tree, *, some: bool = True) -> Tree:
    """The axis along which each of `params` is cut, or -1 (see `models.large`). `Task.sharding` is
    not called for adapters, which the task does not know."""
    own = recipe.task.sharding

    def sharding(path: str) -> PartitionSpec | None:
        return None if own is None or path.endswith(("/lora_a", "/lora_b")) else own(path)

    return axes(params, recipe.shards, sharding, some=some)


def parameters(recipe: Recipe, state: TrainState, *, averaged: bool = False) -> Tree:
    """All parameters of a state of NumPy arrays as the task's tree. With `averaged` they are the
    averages, if the recipe has an EMA."""
    return whole_params(trained_part(recipe, state, averaged=averaged), state.frozen)


def trained_part(recipe: Recipe, state: TrainState, *, averaged: bool) -> Tree:
    """`params` of a state, or their average, as in `parameters`, but with adapters apart."""
    if averaged and recipe.ema is not None:
        assert state.ema is not None
        return flat_of(recipe, state.params).widened().unpack(state.ema)
    return state.params


def fingerprint(params: Tree) -> str:
    """The SHA-256 of the parameters' bytes, leaf by leaf in JAX's tree order (dict keys sorted)."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(as_data(params)):
        digest.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return digest.hexdigest()


class NotFinite(ArithmeticError):
    """A run's loss or parameters are no longer finite. `code` is that of the `DivergedError`, and
    `value` the value at `step`."""

    def __init__(self, code: str, step: int, value: float):
        super().__init__(code)
        self.code, self.step, self.value = code, step, value


def finite(params: Tree) -> bool:
    """Whether no value is NaN or infinite."""
    return all(
        bool(jnp.isfinite(leaf).all())
        if isinstance(leaf, Array)
        else bool(np.all(np.isfinite(leaf)))
        for leaf in jax.tree.leaves(params)
    )


def count(params: Tree) -> int:
    """The number of parameters."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))


def nbytes(tree: Tree) -> int:
    """The bytes of a tree of arrays or shapes on one device. Random keys count as their data."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if is_key(leaf):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        over = getattr(leaf, "sharding", None)
        shape = leaf.shape if over is None else over.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total
