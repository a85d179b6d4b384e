"""A replica's contribution to a step: its gradient, its metric sums, its new state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import RecipeError
from ..recipe import freezing, precision
from ..recipe.recipe import Recipe
from ..recipe.task import Sum, Tree
from ..recipe.user_code import user_code
from . import keys, scaling
from .freeze import still, whole_params
from .layout import tree_sum


def contribution(
    recipe: Recipe, read: tuple[Tree, Tree, Tree, Any, Tree], batch: dict, indices, epochs, number, seed
) -> dict[str, Any]:
    """Augments `batch`, differentiates the loss's total, and returns the values to sum. Traced.

    *Arguments:*

    - `read`: trained parameters, frozen ones, task state, step `()` int32 and the loss's scale, all before
      the
      step (see `state.read`).
    - `batch`, columns `(replica_batch, ...)` as stored; `indices` and `epochs` `(replica_batch,)` int32, the
      index and epoch of each example; `number` `()` int32, the replica. These four may have a leading axis
      over several replicas; then the result is their sum.
    - `seed` `()` uint32: an input, so that runs with other seeds share a program.

    *Returns* `grads`, float32, shaped as the trained parameters; `sums`, a dict of `Sum`; and `state`, the
    leaves of the task's new state as float32 arrays that can be summed over replicas (see `summable`).
    """
    params, frozen, state, step, scale = read

    def objective(params):
        def one(batch, indices, epochs, number):
            whole = whole_params(params, frozen)
            return _forward(recipe, whole, state, step, seed, batch, indices, epochs, number)

        if jnp.ndim(number) == 0:
            return scaled(*one(batch, indices, epochs, number))
        # Differentiated outside of `vmap`, so that a kernel's gradient is one product over the examples of
        # all replicas, not one for each replica. The rest is added in tree order, on which `from_sums`
        # relies.
        totals, aside = jax.vmap(one)(batch, indices, epochs, number)
        return scaled(jnp.sum(totals), jax.tree.map(lambda x: tree_sum(list(x), jnp.add), aside))

    def scaled(total, aside):
        if scale is None:
            return total, (aside, None)
        factor, inverse = scaling.factor(scale, aside["sums"]["loss"].count, jnp.size(number))
        return total * factor, (aside, inverse)

    with precision.products(recipe.precision):
        grads, (aside, inverse) = jax.grad(objective, has_aux=True)(params)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    if inverse is not None:
        grads = jax.tree.map(lambda g: g * inverse, grads)
    return {"grads": grads, **aside}


def _forward(recipe: Recipe, params, state, step, seed, batch, indices, epochs, number):
    """`(loss total, {"sums", "state"})` of one replica."""
    task = recipe.task
    if task.augment is not None:
        with user_code("Task.augment", batch):
            batch = augmented(task.augment, batch, seed, epochs, indices)
    key = keys.replica_key(seed, step, number)
    if task.mix is not None:
        key, mix_key = jax.random.split(key)
        with user_code("Task.mix", batch):
            batch = task.mix(batch, mix_key)
    batch = precision.cast_batch(batch, recipe.precision)
    held = freezing.holding(recipe.held)
    with precision.products(recipe.precision), held, user_code("Task.loss", batch):
        returned = task.loss(precision.cast(params, recipe.precision), state, batch, key, True)
    sums, new_state = checked(returned, state, train=True)
    new_state = still(state, new_state, recipe.held)
    return sums["loss"].total, {"sums": sums, "state": summable(new_state, number, recipe.replicas)}


def augmented(augment: Any, batch: dict, seed, epochs, indices) -> dict:
    """`batch` with each example augmented. Arguments as for `contribution`, of one replica."""
    return jax.vmap(augment)(batch, keys.augment_keys(seed, epochs, indices))


def sums_of(recipe: Recipe, read: tuple[Tree, Tree, Tree, Any, Tree], example: dict) -> dict[str, Sum]:
    """The shapes of `contribution`'s sums, without tracing the gradient. *Arguments:* `read`, as arrays or
    shapes; `example`, column to `ShapeDtypeStruct`, one unbatched example."""

    def traced(params, frozen, state, step, _):
        n = recipe.batch // recipe.replicas
        batch = {name: jnp.zeros((n, *spec.shape), spec.dtype) for name, spec in example.items()}
        zeros, whole = jnp.zeros(n, jnp.int32), whole_params(params, frozen)
        _, aside = _forward(recipe, whole, state, step, jnp.uint32(0), batch, zeros, zeros, jnp.int32(0))
        return aside["sums"]

    return jax.eval_shape(traced, *read)


def checked(returned: Any, state: Tree, *, train: bool = False) -> tuple[dict[str, Sum], Tree]:
    """The sums, in float32, and the state that a loss returned; in training without those `of_each`. Raises
    `RecipeError` when they do not keep the contract of `Task.loss`."""
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
        total, count = (jnp.asarray(part).astype(jnp.float32) for part in (value.total, value.count))
        sums[name] = Sum(total, count, value.finish, value.each)
    loss = sums["loss"]
    if loss.finish is not None or loss.each:
        raise RecipeError("loss-with-finish")
    if loss.total.shape != () or loss.count.shape != ():
        raise RecipeError("loss-is-no-number", total=list(loss.total.shape), count=list(loss.count.shape))
    if (made := str(jax.tree.structure(state))) != (got := str(jax.tree.structure(new_state))):
        raise RecipeError("state-of-another-structure", made=made, got=got)
    return sums, new_state


def summable(state: Tree, number, replicas: int) -> list[jax.Array]:
    """The leaves of a replica's state as float32 arrays from whose sum `from_sums` makes the step's state.

    Floating leaves are averaged. The mean of `replicas` equal values is that value only if their number is a
    power of two. Otherwise replica 0's values are passed on too, with zeros from all other replicas, and
    `from_sums` uses them where all values are equal. Other leaves (counters) are those of replica 0, as two
    halves of 16 bits, which float32 represents exactly.
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


def from_sums(old: Tree, summed: list[jax.Array], replicas: int, blocks: int | None = None) -> Tree:
    """The state after a step, with the structure of `old`, from sums of `summable`: first over the replicas
    of each block, then over the `blocks` (if None, as many as replicas)."""
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
            mean = jnp.where(total == _multiple(_multiple(first, replicas // blocks), blocks), first, mean)
        new.append(mean.astype(leaf.dtype))
    return jax.tree.unflatten(structure, new)


def _multiple(value: jax.Array, replicas: int) -> jax.Array:
    """The sum of `replicas` equal values in tree order; each partial sum is computed once."""
    known = {1: value}

    def multiple(n: int) -> jax.Array:
        if n not in known:
            known[n] = multiple((n + 1) // 2) + multiple(n // 2)
        return known[n]

    return multiple(replicas)


def _inexact(replicas: int) -> bool:
    """Whether the mean of `replicas` equal values may be rounded to another value."""
    return replicas & (replicas - 1) != 0
