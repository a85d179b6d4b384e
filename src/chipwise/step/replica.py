"""Computes a replica's contribution to a step: its gradient, its metric sums, its new state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr

from ..base import RecipeError
from ..data.sources import Spec
from ..models.adapted import made_of
from ..recipe import freezing, logits, precision
from ..recipe.random_keys import as_data, as_keys
from ..recipe.recipe import Recipe
from ..recipe.source import rows_of
from ..recipe.task import Sum, Tree, by_path
from ..recipe.user_code import user_code
from . import keys, scaling
from .freeze import parts_of, still, whole_params
from .layout import tree_sum
from .window import Batch, WindowRows

if TYPE_CHECKING:
    from .state import TrainState


class ReplicaInput(NamedTuple):
    """The arguments of the program `replica`, in the order in which they are flattened.

    The cache keys of programs depend on this order."""

    # A named tuple, since the host makes one for each call: it takes a third of the time of a
    # frozen dataclass.

    params: Tree
    """The trained parameters: the vector of `Update.flat`, or that of `Update.whole` for a group.
    For `contribution` they are the tree that is unpacked from it."""
    frozen: Tree
    """The frozen parameters, as a tree, or `None`."""
    state: Tree
    """The task's state before the step."""
    step: Array
    """`()` int32: the number of steps done."""
    scale: Tree
    """The scale of the loss in `f16` (see `step.scaling`), or `None`."""
    rows: WindowRows
    """The window, with the indices of this device."""
    data: Batch
    """The device's examples of the step, as `window.flat` columns `(group_batch, ...)`. For a group
    `(replicas, replica_batch, ...)`. For `Step.in_turn` it may be all examples."""
    place: Array
    """`(2,)` int32: the replica's number among all replicas, and on this device. If a call computes
    several replicas, those of the first one. For a loop, `(calls, 2)`."""

    @classmethod
    def of(cls, state: TrainState, rows: WindowRows, data: Batch, place: Any) -> ReplicaInput:
        """Returns the input with the parts of the training state that a replica reads. With fewer
        arguments a call is faster."""
        return cls(
            state.params,
            state.frozen,
            state.state,
            state.step,
            state.scale,
            rows,
            data,
            place,
        )


class ReplicaBatch(NamedTuple):
    """The examples of one replica in a step. All fields may have a leading axis over several
    replicas."""

    columns: Batch
    """`(replica_batch, ...)` each, as stored."""
    indices: Array
    """`(replica_batch,)` int32: the index of each example."""
    epochs: Array
    """`(replica_batch,)` int32: the epoch of each example."""
    number: Array
    """`()` int32: the replica's number among all replicas."""


def contribution(recipe: Recipe, inputs: ReplicaInput, batch: ReplicaBatch) -> dict[str, Any]:
    """Augments `batch`, differentiates the loss's total, and returns the values to sum. Traced.

    *Arguments:* `inputs` has the parameters as a tree. If `batch` has several replicas, the result
    is the sum over these.

    *Returns* `grads`, float32, shaped as the trained parameters, `sums`, a dict of `Sum`, and
    `state`, the leaves of the task's new state as float32 arrays that can be summed over replicas
    (see `summable`).
    """

    def objective(params: Tree) -> tuple[Array, Any]:
        def one(batch: ReplicaBatch) -> tuple[Array, dict[str, Any]]:
            model = params, inputs.frozen, inputs.state
            return _forward(recipe, *model, inputs.step, inputs.rows["seed"], batch)

        if jnp.ndim(batch.number) == 0:
            return scaled(*one(batch))
        # Differentiated outside of `vmap`, so that a kernel's gradient is one product over the
        # examples of all replicas, not one for each replica. The rest is added in tree order, on
        # which `from_sums` relies.
        totals, aside = jax.vmap(one)(batch)
        return scaled(jnp.sum(totals), jax.tree.map(lambda x: tree_sum(list(x), jnp.add), aside))

    def scaled(total: Array, aside: dict[str, Any]) -> tuple[Array, Any]:
        if inputs.scale is None:
            return total, (aside, None)
        factor, inverse = scaling.factor(
            inputs.scale, aside["sums"]["loss"].count, jnp.size(batch.number)
        )
        return total * factor, (aside, inverse)

    with precision.products(recipe.precision):
        grads, (aside, inverse) = jax.grad(objective, has_aux=True)(inputs.params)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    if inverse is not None:
        grads = jax.tree.map(lambda g: g * inverse, grads)
    return {"grads": grads, **aside}


def _forward(
    recipe: Recipe,
    params: Tree,
    frozen: Tree,
    state: Tree,
    step: Array,
    seed: Array,
    batch: ReplicaBatch,
) -> tuple[Array, dict[str, Any]]:
    """Returns `(loss total, {"sums", "state"})` of one replica."""
    task, (whole, state) = recipe.task, as_keys((whole_params(params, frozen), state))
    columns, indices, epochs, number = batch
    if task.augment is not None:
        with user_code("Task.augment", columns):
            columns = augmented(task.augment, columns, seed, epochs, indices)
    key = keys.replica_key(seed, step, number)
    if task.mix is not None:
        key, mix_key = jax.random.split(key)
        with user_code("Task.mix", columns):
            columns = task.mix(columns, mix_key)
    columns = precision.cast_batch(columns, recipe.precision, task.uncast)
    whole = precision.cast(whole, recipe.precision)
    parts = made_of(parts_of(params, frozen, whole))
    held = freezing.holding(recipe.held)
    with precision.products(recipe.precision), held, parts, user_code("Task.loss", columns):
        returned = task.loss(whole, state, columns, key, True)
    sums, new_state = checked(returned, state, train=True)
    new_state = still(state, new_state, recipe.held)
    return sums["loss"].total, {
        "sums": sums,
        "state": summable(as_data(new_state), number, recipe.replicas),
    }


def augmented(
    augment: Callable[..., Any],
    columns: Batch,
    seed: int | Array,
    epochs: Array,
    indices: Array,
) -> Batch:
    """Returns `columns` with each example augmented. The arguments are those of one replica (see
    `ReplicaBatch`) and the seed (see `keys`)."""
    return jax.vmap(augment)(columns, keys.augment_keys(seed, epochs, indices))


def traced_loss(
    recipe: Recipe, state: TrainState, example: Spec
) -> tuple[ClosedJaxpr, dict[str, Sum]]:
    """A replica's loss, without its gradient, and the shapes of `contribution`'s sums. The last
    arguments of the loss are the columns, and its first result is its total.

    *Arguments:* `state` has arrays or shapes. `example` maps each column to a `ShapeDtypeStruct`,
    that of one unbatched example."""
    n = recipe.batch // recipe.replicas

    def traced(params: Tree, frozen: Tree, state: Tree, columns: Batch) -> tuple[Array, Any]:
        zeros = jnp.zeros(n, jnp.int32)
        batch = ReplicaBatch(columns, zeros, zeros, jnp.int32(0))
        total, aside = _forward(recipe, params, frozen, state, jnp.int32(0), jnp.uint32(0), batch)
        return total, aside["sums"]

    model = state.params, state.frozen, state.state
    made, (_, sums) = logits.traced(traced, *model, rows_of(example, n))
    return made, sums


def checked(returned: Any, state: Tree, *, train: bool = False) -> tuple[dict[str, Sum], Tree]:
    """Returns the sums, in float32, and the state that a loss returned. In training it omits the
    sums `of_each`. Raises `RecipeError` when they do not keep the contract of `Task.loss`."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and hasattr(returned[0], "items")):
        raise RecipeError("loss-returns", got=type(returned).__name__)
    metrics, new_state = returned
    if "loss" not in metrics:
        raise RecipeError("loss-without-loss", metrics=sorted(metrics))
    sums = {}
    for name, value in sorted(metrics.items()):
        if not isinstance(value, Sum):
            raise RecipeError("metric-is-no-sum", metric=name, got=type(value).__name__)
        if value.finish is not None and not callable(value.finish):
            raise RecipeError("finish-is-no-function", metric=name, got=type(value.finish).__name__)
        if value.each and train:
            continue
        total, count = (
            jnp.asarray(part).astype(jnp.float32) for part in (value.total, value.count)
        )
        sums[name] = dataclasses.replace(value, total=total, count=count)
    loss = sums["loss"]
    if loss.finish is not None or loss.each:
        raise RecipeError("loss-with-finish")
    if loss.total.shape != () or loss.count.shape != ():
        raise RecipeError(
            "loss-is-no-number", total=list(loss.total.shape), count=list(loss.count.shape)
        )
    if (made := _structure(state)) != (got := _structure(new_state)):
        raise RecipeError("state-of-another-structure", made=made, got=got)
    if not train:
        return sums, new_state
    new_state = jax.tree.map(jnp.asarray, new_state)
    for (path, old), new in zip(by_path(state).items(), jax.tree.leaves(new_state), strict=True):
        if _laid_out(old) != _laid_out(new):
            made, got = (f"{leaf.dtype} {leaf.shape}" for leaf in (old, new))
            raise RecipeError("state-changed", path=path, made=made, got=got)
    return sums, new_state


def _structure(state: Tree) -> str:
    return str(jax.tree.structure(as_data(state)))


def _laid_out(leaf: Array) -> tuple[Any, ...]:
    """What decides the layout of a leaf of the state in the summed vector (see `summable`)."""
    kinds = (jnp.floating, jnp.complexfloating)
    return leaf.shape, *(jnp.issubdtype(leaf.dtype, kind) for kind in kinds)


def summable(state: Tree, number: Array, replicas: int) -> list[Array]:
    """Converts the leaves of a replica's state to float32 arrays. From their sum over replicas,
    `from_sums` computes the step's state.

    Floating leaves are averaged. The mean of `replicas` equal values is certain to be that value
    only if their number is a power of two. Otherwise replica 0's values are passed on too, with
    zeros from all other replicas, and `from_sums` uses them where all values are equal. Other
    leaves (counters, the words of random keys) are those of replica 0, as two halves of 16 bits,
    which float32 represents exactly.
    """
    leaves = []
    for leaf in jax.tree.leaves(state):
        first = jnp.equal(number, 0)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            value = leaf.astype(jnp.float32)
            leaves.append(value)
            if _inexact(replicas):
                leaves.append(jnp.where(first, value, jnp.zeros_like(value)))
        else:
            of_first = jnp.where(first, leaf.astype(jnp.int32), 0)
            leaves.append(jnp.stack([of_first >> 16, of_first & 0xFFFF]).astype(jnp.float32))
    return leaves


def from_sums(old: Tree, summed: list[Array], replicas: int, blocks: int | None = None) -> Tree:
    """Returns the state after a step, with the structure of `old`, from sums of `summable`. The
    sums are first over the replicas of each block, then over the `blocks`. If `blocks` is `None`,
    each replica is a block."""
    blocks = blocks or replicas
    leaves, structure = jax.tree.flatten(old)
    parts, new = iter(summed), []
    for leaf in leaves:
        total = next(parts)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            high, low = total.astype(jnp.int32)
            new.append(((high << 16) | low).astype(leaf.dtype))
            continue
        mean = total / jnp.float32(replicas)
        if _inexact(replicas):
            first = next(parts)
            mean = jnp.where(
                total == _multiple(_multiple(first, replicas // blocks), blocks), first, mean
            )
        new.append(mean.astype(leaf.dtype))
    return jax.tree.unflatten(structure, new)


def _multiple(value: Array, replicas: int) -> Array:
    """The sum of `replicas` equal values in tree order. Each partial sum is computed once."""
    known = {1: value}

    def multiple(n: int) -> Array:
        if n not in known:
            known[n] = multiple((n + 1) // 2) + multiple(n // 2)
        return known[n]

    return multiple(replicas)


def _inexact(replicas: int) -> bool:
    """Whether the mean of `replicas` equal values may be rounded to another value."""
    return replicas & (replicas - 1) != 0
