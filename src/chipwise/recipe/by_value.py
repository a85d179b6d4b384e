"""A rule that moves each value by itself, as an optax transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = Any


class RuleState(NamedTuple):
    """What a rule remembers from step to step.

    *Fields:* `steps`: the steps so far. `totals`: numbers that all values share, or all of a group.
    `moments`: trees like the parameters.
    """

    steps: jax.Array
    totals: tuple[jax.Array, ...]
    moments: tuple[Tree, ...]


def by_value(
    move: Callable[..., tuple[jax.Array, ...]],
    moments: tuple[float, ...] = (),
    tick: Callable[..., tuple[Any, ...]] = lambda time: (),
    totals: tuple[tuple[float, Any], ...] = (),
) -> optax.GradientTransformation:
    """The transformation of a gradient by a rule for one value.

    *Arguments:*

    - `move`: a function `(time, totals, gradient, value, *moments) -> (update, *moments)` of arrays
      of one shape. `time` `()` is 1 in the first step.
    - `tick`: the shared numbers, `(time, *totals) -> totals`. It is called before `move`.
    - `moments`: the numbers that they begin with.
    - `totals`: these too, each with the setting whose shape it has. That is `()`, but in groups of
      parameters with a setting of their own.
    """

    def dtype(params: Tree) -> Any:
        return jnp.result_type(jnp.float32, *jax.tree.leaves(params))

    def init(params: Tree) -> RuleState:
        return RuleState(
            jnp.int32(0),
            tuple(jnp.full(jnp.shape(like), x, dtype(params)) for x, like in totals),
            tuple(optax.tree.full_like(params, x) for x in moments),
        )

    def update(updates: Tree, memory: RuleState, params: Tree = None) -> tuple[Tree, RuleState]:
        steps = memory.steps + 1
        time = steps.astype(dtype(updates))
        shared = tick(time, *memory.totals)
        moved = jax.tree.map(
            lambda *row: move(time, shared, *row), updates, params, *memory.moments
        )
        parts = jax.tree.structure((0,) * (1 + len(moments)))
        updates, *after = jax.tree.transpose(jax.tree.structure(updates), parts, moved)
        return updates, RuleState(steps, shared, tuple(after))

    return optax.GradientTransformation(init, update)
