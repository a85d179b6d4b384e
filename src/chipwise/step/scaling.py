"""Adapts the loss scale in float16. Overflow skips a step and halves the scale. Many good steps
double it.

All of this is computed on the devices, from values with the same bits on each. The scale is part of
the training state, and overflow is detected in the sum of squares of the summed gradient. Scales
are powers of two, so multiplying and dividing by them rounds nothing.

The differentiated loss is a total. It is multiplied by the scale and divided by its count, which is
rounded down to a power of two, as if it were a mean. So the usual first scale suits any batch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from ..recipe.task import Tree

if TYPE_CHECKING:
    from .state import TrainState

FIRST = 2.0**16
GOOD_STEPS = 2000
"""The number of steps without overflow after which the scale is doubled. This and `FIRST` are the
values of PyTorch's `GradScaler` (after Micikevicius et al. 2018, arXiv:1710.03740)."""
_LEAST, _MOST = 1.0, 2.0**40


def first() -> dict[str, Array]:
    """Returns the state before the first step: `scale` `()` float32, and `good` `()` int32, the
    number of good steps since the scale changed."""
    return {"scale": jnp.float32(FIRST), "good": jnp.int32(0)}


def factor(state: dict[str, Array], count: Array, replicas: int) -> tuple[Array, Array]:
    """The factor for a loss total, and the one for its gradient afterwards. Both are `()` float32
    powers of two.

    *Arguments:* `count` `()` is the number of terms in the total of `replicas` replicas.
    """
    _, exponent = jnp.frexp(count / jnp.float32(replicas))
    down = 1 - exponent.astype(jnp.int32)
    return jnp.ldexp(state["scale"], down), jnp.ldexp(1 / state["scale"], -down)


def unless_overflown(before: TrainState, after: TrainState, square: Array) -> TrainState:
    """Returns `after` with the next scale. If the gradient overflowed, returns `before` with the
    next scale and with the step and metrics of `after`.

    *Arguments:* `square` `()` is the sum of squares of the summed gradient.

    If a gradient is not finite at the smallest scale, scaling cannot help. The step is taken, and
    the run stops because its parameters are not finite.
    """
    assert before.scale is not None
    scale, good = before.scale["scale"], before.scale["good"]
    finite = jnp.isfinite(square)
    taken = finite | (scale <= _LEAST)

    def chosen(new: Tree, old: Tree) -> Tree:
        return jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, old)

    good = jnp.where(finite, good + jnp.int32(1), jnp.int32(0))
    grows = good >= GOOD_STEPS
    raised = jnp.where(grows, jnp.minimum(2 * scale, _MOST), scale)
    return dataclasses.replace(
        after,
        params=chosen(after.params, before.params),
        state=chosen(after.state, before.state),
        optimizer=chosen(after.optimizer, before.optimizer),
        ema=chosen(after.ema, before.ema),
        scale={
            "scale": jnp.where(finite, raised, jnp.maximum(scale / 2, _LEAST)),
            "good": jnp.where(grows, jnp.int32(0), good),
        },
    )
