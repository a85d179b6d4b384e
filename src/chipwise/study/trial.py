"""Tries another batch on a present device: the memory that the compiler states, and some timed real steps.

Other work on the machine may last longer than steps of a small net, and the first steps are slower than the
rest. So each trial warms up and then times some tenths of a second, and batches to compare alternate: what
slows the machine for a while slows both.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import jax

from ..data.sources import nbytes
from ..engine import feed
from ..engine.blueprint import Memory, tracing
from ..engine.layout import Layout
from ..engine.on import ALL, On
from ..engine.placement import Placement
from ..engine.programs import Programs
from ..engine.session import Session
from ..machine.arithmetic import fixed
from ..machine.detect import Machine
from ..machine.limits import memory as host_memory
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact
from .range_test import tested

ROUNDS = 5
"""Visits of each batch, while there is time."""
LONGEST_SECONDS = 60.0
"""For which the steps of all visits may last."""
LEAST_STEPS = 3
"""Of a visit, however long a step takes: one after compilation, one to see how long it takes, one timed."""

_WARM_UP, _WARM_UP_SECONDS = 10, 1.0  # untimed steps, or fewer if they take longer than this
_TIMED, _TIMED_SECONDS = 5, 0.3  # timed steps, or more if they take less than this
_LONGEST_TIMED = 3.0  # seconds; fewer steps if they take more
_ENDLESS = 10**6  # steps, more than a trial makes


@dataclass(frozen=True)
class Trial:
    """`examples_per_second`: global; None if the device had too little memory; then `refused` has the reason.
    `seconds`: of all steps of the trial."""

    examples_per_second: float | None
    refused: str = ""
    seconds: float = 0.0


def timed(session: Session, steps: int) -> float:
    """Makes `steps` steps and waits until they are done. *Returns* the seconds."""
    began = time.perf_counter()
    session.advance(steps)
    session.wait()
    return time.perf_counter() - began


@fixed()
def try_batch(recipe: Recipe, on: On = ALL) -> Trial:
    """Runs some steps of `recipe` with fresh parameters. *Arguments:* `on` as in `fit`.

    Running out of memory is a result; every other error is raised.
    """
    optimizer = recipe.optimizer
    rate = optimizer.hyper[optimizer.lr_name].highest(recipe.clock) or 1e-3
    held = tested(recipe, rate, rate, _ENDLESS)  # constants: schedules do not matter in so short a run
    try:
        with Session(held, on) as session:
            session.begin()
            began = time.perf_counter()
            timed(session, 1)
            each = timed(session, 1)
            if more := min(_WARM_UP, int(_WARM_UP_SECONDS / each)):
                each = timed(session, more) / more
            steps = timed_steps(each)
            taken = timed(session, steps)
            return Trial(steps * recipe.batch / taken, seconds=time.perf_counter() - began)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return Trial(None, " ".join((str(error) or "out of memory").split())[:200])
        raise


def timed_steps(each: float) -> int:
    """The number of timed steps of `each` seconds: 5, or as many as take 0.3 s; at most 3 s, at least one."""
    return max(1, min(max(_TIMED, round(_TIMED_SECONDS / each)), int(_LONGEST_TIMED / each)))


def rounds(first: float) -> int:
    """The number of rounds, if the steps of the first one took `first` seconds."""
    return max(1, min(ROUNDS, int(LONGEST_SECONDS / first))) if first else ROUNDS


# ---- memory, before any step


def available(machine: Machine, devices: int) -> tuple[int, Fact]:
    """The free bytes of one of `devices` devices, and their source.

    CPU devices share the free memory of the host.
    """
    stats = machine.devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        return free, fact("memory-free-on-device", device=machine.kind)
    source = fact("memory-free-shared", devices=devices) if devices > 1 else fact("memory-free-on-host")
    return host_memory().available_bytes // devices, source


def needed(recipe: Recipe, machine: Machine, layout: Layout) -> Memory:
    """Bytes of one device while `recipe` trains in `layout`, by category. Compiles the programs of the step
    and runs nothing.

    Evaluation counts with the data that it keeps on the device; it fits its batch to what is left.

    Raises `RecipeError` if the recipe's own functions raise an error while they are traced.
    """
    task, limit = recipe.task, (machine.devices[0].memory_stats() or {}).get("bytes_limit")
    resident, placement = feed.resident(task.train, limit), Placement.laid(machine, layout)
    with tracing(recipe.name):
        programs = Programs(recipe, layout, placement, resident=resident)
        made = programs.blueprint
        programs.compile()
    free, source = available(machine, layout.devices)
    known = {name: a for name, one in programs.executables.items() if (a := one.memory_analysis())}
    evaluation = nbytes(task.eval) if task.eval is not None and feed.fits(task.eval, limit) else 0
    temporary = {name: a.temp_size_in_bytes for name, a in known.items()}
    code = sum(a.generated_code_size_in_bytes for a in known.values())
    memory = made.memory(temporary, code, free, source)
    return replace(memory, data=memory.data + evaluation)
