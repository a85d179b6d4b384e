"""Some real steps at another batch: does it run, and how fast.

A step of a small net takes less than what disturbs a machine, and the first ones are slower than the rest. So
each visit warms up and then times some tenths of a second, and batches that are to be compared are visited
in turn: what slows the machine for a while slows both.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import jax

from ..engine.on import ALL, On
from ..engine.stepper import Stepper
from ..recipe.recipe import Recipe
from .lr_sweep import swept
from .move.values import peak

ROUNDS = 5
"""Visits of each batch, while there is time."""
LONGEST_SECONDS = 60.0
"""For which the steps of all visits may last."""
LEAST_STEPS = 3
"""Of a visit, however long a step takes: one after compilation, one to see how long it takes, one timed."""

_WARM_UP, _WARM_UP_SECONDS = 10, 1.0  # steps that are not timed, where they take no longer
_TIMED, _TIMED_SECONDS = 5, 0.3  # steps that are timed, or more where they take less
_LONGEST_TIMED = 3.0  # seconds: or fewer where they take more
_ENDLESS = 10**6  # steps, more than a visit makes


@dataclass(frozen=True)
class Trial:
    """`examples_per_second`, global; None when the device had too little memory, as `refused` then says.
    `seconds`: what all steps of the visit took."""

    examples_per_second: float | None
    refused: str = ""
    seconds: float = 0.0


def try_batch(recipe: Recipe, on: On = ALL) -> Trial:
    """Some steps of `recipe` on fresh parameters. *Arguments:* `on` as of `Stepper`.

    Running out of memory is an answer here; every other error is raised.
    """
    optimizer = recipe.optimizer
    rate = peak(optimizer.hyper[optimizer.lr_name], recipe.clock) or 1e-3
    held = swept(recipe, rate, rate, _ENDLESS)  # no schedule has anything to say about so short a run
    try:
        with Stepper(held, on) as stepper:
            began = time.perf_counter()
            _seconds(stepper, 1)
            each = _seconds(stepper, 1)
            if more := min(_WARM_UP, int(_WARM_UP_SECONDS / each)):
                each = _seconds(stepper, more) / more
            steps = timed_steps(each)
            taken = _seconds(stepper, steps)
            return Trial(steps * recipe.batch / taken, seconds=time.perf_counter() - began)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return Trial(None, " ".join((str(error) or "out of memory").split())[:200])
        raise


def timed_steps(each: float) -> int:
    """How many steps of `each` seconds are timed: 5, or as many as take 0.3 s; in 3 s, and at least one."""
    return max(1, min(max(_TIMED, round(_TIMED_SECONDS / each)), int(_LONGEST_TIMED / each)))


def rounds(first: float) -> int:
    """How many rounds there is time for, when the steps of the first one took so many seconds."""
    return max(1, min(ROUNDS, int(LONGEST_SECONDS / first))) if first else ROUNDS


def _seconds(stepper: Stepper, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        stepper.step()
    stepper.metrics()  # waits
    return time.perf_counter() - began
