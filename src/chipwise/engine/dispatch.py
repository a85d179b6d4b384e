"""Several steps in one call, if that is faster.

Starting a program takes the host 10 µs to 1 ms, which matters for small steps. A loop over steps inside of
the program avoids this, but compilers optimize a loop's body differently: on the CPU, a small step of
`digits` becomes 1.8 times as fast, while JAX's gradient of a convolution becomes 40 times as slow (2 cores,
JAX 0.10.2; see `models.conv_cpu`). So both are timed, on a copy of the state, and the faster one is used.

This applies only to `exact=False` on one device. Otherwise a step consists of several programs, so that its
bits do not depend on the number of devices.
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
_LONG_SECONDS = 0.003  # for such a step, the time of the start does not matter
_LARGE_BYTES = 64 << 20  # with such a state steps are long enough too, so it is not copied for a trial
GAIN = 1.1  # required of a loop, so that noise does not decide

Call = Callable[..., tuple[Any, jax.Array]]


def looped(step: Call) -> Call:
    """A function `(state, frozen, window, data, place, steps)` that calls `step` `steps` times, and returns
    the state and a token."""

    def run(state, frozen, window, data, place, steps):
        after = lax.fori_loop(0, steps, lambda _, s: step(s, frozen, window, data, place)[0], state)
        return after, after.step

    return run


def compile_loop(step: Call, arguments: tuple, options: dict[str, Any] | None) -> Any:
    """`looped(step)`, compiled for a `steps` of `()` int32."""
    return (
        jax.jit(looped(step), donate_argnums=0, compiler_options=options)
        .lower(*arguments, jnp.int32(1))
        .compile()
    )


def worth_a_trial(single: Any, arguments: tuple) -> bool:
    """Whether the state is small and a step, timed on a copy of it, so short that its start may matter."""
    state, *rest = arguments
    if nbytes(state) > _LARGE_BYTES:
        return False
    _seconds(lambda s: single(s, *rest), state, 1)  # the first call may load the program
    return _seconds(lambda s: single(s, *rest), state, 2) < _LONG_SECONDS


def gain(single: Any, several: Any, arguments: tuple) -> float:
    """The speedup of `STEPS` steps in one call over `STEPS` calls."""
    state, *rest = arguments
    steps = jnp.int32(STEPS)
    separate = together = np.inf
    for _ in range(3):  # alternating, since machines are noisy
        separate = min(separate, _seconds(lambda s: single(s, *rest), state, STEPS))
        together = min(together, _seconds(lambda s: several(s, *rest, steps), state, 1) / STEPS)
    return separate / together


def _seconds(call: Callable[[Any], tuple[Any, jax.Array]], state: Any, times: int) -> float:
    """The mean seconds of `times` calls, on a copy of `state`."""
    state = jax.block_until_ready(jax.tree.map(jnp.copy, state))
    began = time.perf_counter()
    for _ in range(times):
        state, token = call(state)
    jax.block_until_ready((state, token))
    return (time.perf_counter() - began) / times
