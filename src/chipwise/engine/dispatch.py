"""Several steps in one call, where that is faster.

Starting a program costs the host some 10 µs to 1 ms, which a small step feels. A loop over steps inside the
program saves it, but compilers do not always make of a loop's body what they make of the body alone: on
the CPU a small step of `digits` becomes 1.8 times as fast, while the gradient of a convolution as JAX writes
it becomes 40 times as slow (2 cores, JAX 0.10.2; see `models.conv_cpu`). So both are tried, on a copy of the
state, and the faster one is kept.

For the one program of `exact=False` on one device only: where bits must not depend on the number of
devices, the programs of a step stay apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .state import nbytes

STEPS = 16
_LONG_SECONDS = 0.003  # a step that takes so long does not feel its start
_LARGE_BYTES = 64 << 20  # of state, whose steps are long enough too: not copied for a trial
_GAIN = 1.1  # that a loop must bring: the clock must not decide between equals

Call = Callable[..., tuple[Any, jax.Array]]


def looped(step: Call) -> Call:
    """`steps` times `step`: (state, frozen, window, data, place, steps) to the state after and a token."""

    def run(state, frozen, window, data, place, steps):
        after = lax.fori_loop(0, steps, lambda _, s: step(s, frozen, window, data, place)[0], state)
        return after, after.step

    return run


def compile_loop(step: Call, arguments: tuple, options: dict[str, Any] | None) -> Any:
    """`looped(step)`, compiled; its last argument is `()` int32."""
    return (
        jax.jit(looped(step), donate_argnums=0, compiler_options=options)
        .lower(*arguments, jnp.int32(1))
        .compile()
    )


def worth_a_trial(single: Any, arguments: tuple) -> bool:
    """Whether the state is small and a step, run on a copy of it, so short that its start may matter."""
    state, *rest = arguments
    if nbytes(state) > _LARGE_BYTES:
        return False
    _seconds(lambda s: single(s, *rest), state, 1)  # the first call of a program may load it
    return _seconds(lambda s: single(s, *rest), state, 2) < _LONG_SECONDS


def gain(single: Any, several: Any, arguments: tuple) -> float:
    """How many times faster `STEPS` steps are in one call than in as many."""
    state, *rest = arguments
    steps = jnp.int32(STEPS)
    apart = together = np.inf
    for _ in range(3):  # in turns, since machines are noisy
        apart = min(apart, _seconds(lambda s: single(s, *rest), state, STEPS))
        together = min(together, _seconds(lambda s: several(s, *rest, steps), state, 1) / STEPS)
    return apart / together


def is_worth_it(ratio: float) -> bool:
    return ratio >= _GAIN


def _seconds(call: Callable[[Any], tuple[Any, jax.Array]], state: Any, times: int) -> float:
    """Of one of `times` calls, on a copy of `state`."""
    state = jax.block_until_ready(jax.tree.map(jnp.copy, state))
    began = time.perf_counter()
    for _ in range(times):
        state, token = call(state)
    jax.block_until_ready((state, token))
    return (time.perf_counter() - began) / times
