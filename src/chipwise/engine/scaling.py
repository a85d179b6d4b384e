"""The scale of the loss in float16: overflow skips a step and halves it, many good steps double it.

All of it happens on the devices, from values that are the same bits on every one: the scale is part of the
training state, and overflow shows in the sum of squares of the summed gradient. Scales are powers of two, so
that multiplying by one and dividing again rounds nothing.

The loss that is differentiated is a total. It is multiplied by the scale over its count, rounded down
to a power of two, as if it were a mean: the usual first scale then suits any batch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from .state import TrainState

FIRST = 2.0**16
GOOD_STEPS = 2000
"""Steps without overflow after which the scale is doubled; this and `FIRST` as PyTorch's `GradScaler` has
them (after Micikevicius et al. 2018, arXiv:1710.03740)."""
_LEAST, _MOST = 1.0, 2.0**40


def first() -> dict[str, jax.Array]:
    """Before the first step: `scale` `()` float32, and `good` `()` int32, the good steps since it changed."""
    return {"scale": jnp.float32(FIRST), "good": jnp.int32(0)}


def factor(state: Any, count: jax.Array, replicas: int) -> tuple[jax.Array, jax.Array]:
    """What to multiply a loss total by, and its gradient afterwards, both `()` float32 powers of two.

    *Arguments:* `count` `()`, the terms of the total; `replicas`, whose terms they are.
    """
    _, exponent = jnp.frexp(count / jnp.float32(replicas))
    down = 1 - exponent.astype(jnp.int32)
    return jnp.ldexp(state["scale"], down), jnp.ldexp(1 / state["scale"], -down)


def unless_overflown(before: TrainState, after: TrainState, square: jax.Array) -> TrainState:
    """`after` with the next scale; where the gradient overflowed, `before` but for the step and the metrics.

    *Arguments:* `square` `()`: the sum of squares of the summed gradient.

    A gradient that is not finite at the smallest scale is not the scale's fault: its step is taken, and the
    run stops because its parameters are not finite.
    """
    scale, good = before.scale["scale"], before.scale["good"]
    finite = jnp.isfinite(square)
    taken = finite | (scale <= _LEAST)

    def kept(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, old)

    good = jnp.where(finite, good + jnp.int32(1), jnp.int32(0))
    grows = good >= GOOD_STEPS
    risen = jnp.where(grows, jnp.minimum(2 * scale, _MOST), scale)
    return dataclasses.replace(
        after,
        params=kept(after.params, before.params),
        state=kept(after.state, before.state),
        optimizer=kept(after.optimizer, before.optimizer),
        ema=kept(after.ema, before.ema),
        scale={
            "scale": jnp.where(finite, risen, jnp.maximum(scale / 2, _LEAST)),
            "good": jnp.where(grows, jnp.int32(0), good),
        },
    )
