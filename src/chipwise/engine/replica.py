"""What one replica contributes to a step: its gradient, its metric sums, its new state."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import RecipeError
from ..recipe import precision
from ..recipe.recipe import Recipe
from ..recipe.task import Sum, Tree
from . import keys


def contribution(
    recipe: Recipe, params: Tree, state: Tree, step, batch: dict, indices, epochs, number, seed
) -> dict[str, Any]:
    """Augments `batch`, differentiates the loss's total, and returns what is to be summed. Traced.

    *Arguments:* `params`, `state` and `step` `()` int32, before the step; `batch`, columns
    `(replica_batch, ...)` as stored; `indices` and `epochs` `(replica_batch,)` int32, which example in
    which epoch each is; `number` `()` int32, the replica. With one more axis in front of these four they
    are several replicas, mapped over, and what is returned is already their sum. `seed` `()` uint32: an
    input, so that runs which differ in nothing else share a program.

    *Returns* `grads` like `params`, `sums`, a dict of `Sum`, and `state`, the leaves of the task's new
    state as float32 arrays that may be summed over replicas (see `summable`).
    """

    def objective(params):
        one = functools.partial(_forward, recipe, params, state, step, seed)
        if jnp.ndim(number) == 0:
            return one(batch, indices, epochs, number)
        # The gradient is taken outside the map, so that a kernel's gradient is one product over all the
        # replicas' examples and not one for each replica, added later.
        totals, made = jax.vmap(one)(batch, indices, epochs, number)
        return jnp.sum(totals), jax.tree.map(lambda x: jnp.sum(x, axis=0), made)

    with precision.products(recipe.precision):
        grads, made = jax.grad(objective, has_aux=True)(params)
    return {"grads": jax.tree.map(lambda g: g.astype(jnp.float32), grads), **made}


def _forward(recipe: Recipe, params, state, step, seed, batch, indices, epochs, number):
    """`(loss total, {"sums", "state"})` of one replica."""
    task = recipe.task
    if task.augment is not None:
        batch = jax.vmap(task.augment)(batch, keys.augment_keys(seed, epochs, indices))
    key = keys.replica_key(seed, step, number)
    if task.mix is not None:
        key, mix_key = jax.random.split(key)
        batch = task.mix(batch, mix_key)
    batch = precision.cast_batch(batch, recipe.precision)
    with precision.products(recipe.precision):
        made = task.loss(precision.cast(params, recipe.precision), state, batch, key, True)
    sums, new_state = checked(made, state)
    return sums["loss"].total, {"sums": sums, "state": summable(new_state, number)}


def checked(made: Any, state: Tree) -> tuple[dict[str, Sum], Tree]:
    """What a loss returned, as float32 sums, after saying clearly what does not fit the contract."""
    if not (isinstance(made, tuple) and len(made) == 2 and hasattr(made[0], "items")):
        raise RecipeError('Task.loss must return ({"loss": cw.Sum(total, count), ...}, state).')
    metrics, new_state = made
    if "loss" not in metrics:
        raise RecipeError(f'Task.loss must return a metric "loss", got {", ".join(metrics) or "none"}.')
    sums = {}
    for name, value in sorted(metrics.items()):
        if not isinstance(value, Sum):
            raise RecipeError(
                f'Task.loss must return a cw.Sum(total, count) for "{name}", got {type(value).__name__}; '
                f"from per-example values: cw.Sum.of(values)."
            )
        if value.finish is not None and not callable(value.finish):
            raise RecipeError(
                f'The finish of "{name}" must be a function (total, count) -> value, '
                f"got {type(value.finish).__name__}."
            )
        total, count = (jnp.asarray(part).astype(jnp.float32) for part in (value.total, value.count))
        sums[name] = Sum(total, count, value.finish)
    if sums["loss"].finish is not None:
        raise RecipeError(
            'The "loss" is minimised as total / count and takes no finish: show what finish makes of it '
            "under another name."
        )
    if sums["loss"].total.shape != () or sums["loss"].count.shape != ():
        raise RecipeError(
            f'The total and count of "loss" must be one number each, got shapes {sums["loss"].total.shape} '
            f"and {sums['loss'].count.shape}: sum over the examples, for instance with cw.Sum.of(values)."
        )
    made_by_init, returned = str(jax.tree.structure(state)), str(jax.tree.structure(new_state))
    if returned != made_by_init:
        raise RecipeError(
            f"Task.loss must return a state of the same structure as Task.init made: "
            f"{made_by_init}, got {returned}."
        )
    return sums, new_state


def summable(state: Tree, number) -> list[jax.Array]:
    """The leaves of a replica's state as float32 arrays whose sum over replicas gives the step's state.

    Floating leaves are averaged, so they go in as they are. Others (counters) are replica 0's: they go
    in as two halves of 16 bits, which float32 holds exactly, and as zeros from every other replica.
    """
    leaves = []
    for leaf in jax.tree.leaves(state):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            leaves.append(leaf.astype(jnp.float32))
        else:
            mine = jnp.where(jnp.equal(number, 0), leaf.astype(jnp.int32), 0)
            leaves.append(jnp.stack([mine >> 16, mine & 0xFFFF]).astype(jnp.float32))
    return leaves


def summable_shapes(state: Tree) -> list[jax.ShapeDtypeStruct]:
    """The shapes of `summable(state, number)`."""
    return jax.eval_shape(lambda s: summable(s, jnp.int32(0)), state)


def from_sums(old: Tree, summed: list[jax.Array], replicas: int) -> Tree:
    """The inverse of `summable` after the sum: a state like `old`."""
    leaves, shape = jax.tree.flatten(old)
    new = []
    for leaf, total in zip(leaves, summed, strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            new.append((total / jnp.float32(replicas)).astype(leaf.dtype))
        else:
            high, low = total.astype(jnp.int32)
            new.append(((high << 16) | low).astype(leaf.dtype))
    return jax.tree.unflatten(shape, new)
