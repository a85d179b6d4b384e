"""A few real steps at another batch: does it run, and how fast."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax

from ..recipe import Recipe
from ..train.stepper import Stepper
from ..transfer.values import peak
from .sweep import swept

STEPS = 3  # that are timed, after one that is not


@dataclass(frozen=True)
class Trial:
    """`examples_per_second`, global; None when the device had too little memory, as `refused` then says."""

    examples_per_second: float | None
    refused: str = ""


def try_batch(recipe: Recipe, **where: Any) -> Trial:
    """Some steps of `recipe` on fresh parameters. *Arguments:* `where`, as those of `Stepper`.

    Running out of memory is an answer here; every other error is raised.
    """
    optimizer = recipe.optimizer
    rate = peak(optimizer.hyper[optimizer.lr_name], recipe.clock) or 1e-3
    short = swept(recipe, rate, rate, STEPS + 1)  # no schedule has anything to say about so short a run
    try:
        with Stepper(short, **where) as stepper:
            stepper.step()
            stepper.metrics()
            began = time.perf_counter()
            for _ in range(STEPS):
                stepper.step()
            stepper.metrics()  # waits
            return Trial(STEPS * recipe.batch / (time.perf_counter() - began))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return Trial(None, " ".join((str(error) or "out of memory").split())[:200])
        raise
