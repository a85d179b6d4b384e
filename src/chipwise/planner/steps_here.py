"""A step on the target `cpu`, this machine: its programs are compiled here, and a few calls are timed.

Examples are zeros, so no data is read. If a call would take long, it has fewer examples and is scaled.
Programs that do not fit in memory are not run.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.sharding import Mesh

from ..chips.targets import Target
from ..engine.blueprint import tracing
from ..engine.reduce import AXIS, reducer
from ..words.facts import fact
from .plans import Range
from .programs import StepPrograms, Traceable, held, step_programs
from .timing import OTHER_HOST, StepTime, dispatch_seconds

FLOPS_PER_CORE = 2e10
"""Of float32 products, roughly: to guess how long a call takes before it is made."""

LONG = 8.0
"""Seconds: calls that should take longer are made with fewer examples."""

CALLS, ENOUGH = 3, 2.0
"""Timed calls of a program at most, and seconds after which no further one is made."""

AROUND = 1.4
"""Up and down, of seconds measured with zeros on a machine that does other things too: `benchmarks/overhead`
shows a fifth between runs of one program."""


def compiled_here(target: Target, programs: StepPrograms) -> tuple[StepTime, list[Any]]:
    """The step as compiled for one device of this host's CPU, without its time, and its programs."""
    every, compilation = compiled(programs.programs, programs.recipe.name)
    names = (program.name for program in programs.programs)
    temporary = {n: c.memory_analysis().temp_size_in_bytes for n, c in zip(names, every, strict=True)}
    step = StepTime(
        method="measured",
        flops=programs.calls * flops(every[0]),
        wire_bytes=0.0,
        memory=held(programs, target, temporary, 0),
        compile_seconds=compilation,
        dtypes=programs.replica.contents(target.chip).dtypes,
        notes=(fact("measured-here"),),
    )
    return step, every


def compiled(programs: Sequence[Traceable], name: str) -> tuple[list[Any], Range]:
    """The compiled programs of the recipe `name` for one device of this host's CPU, and the compilation
    time."""
    start = time.perf_counter()
    with jax.default_device(_cpu()), tracing(name):
        executables = [_compile(program) for program in programs]
    return executables, Range.around(time.perf_counter() - start, OTHER_HOST)


def timed_here(target: Target, programs: StepPrograms) -> StepTime:
    """The step with measured times."""
    step, (replica, *others) = compiled_here(target, programs)
    if step.memory is not None and not step.memory.fits:
        return step
    each = programs.recipe.batch // programs.recipe.replicas
    fewer = _examples(each, flops(replica))
    with jax.default_device(_cpu()):
        if fewer < each:
            replica = _compile(_smaller(programs, fewer).replica)
            scaled = fact("measured-on-fewer", fewer=fewer, each=each)
            step = dataclasses.replace(step, notes=(*step.notes, scaled))
        parts = {
            "replica": programs.calls * each / fewer * seconds(replica),
            "reduce": _reduction(programs),
            "update": sum(map(seconds, others)),
        }
    return step.timed(parts, (1 / AROUND, AROUND), dispatch_seconds(programs, target.hosts), "compute")


def _cpu() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]


def _compile(program: Traceable) -> Any:
    return jax.jit(program.function).lower(*program.specs).compile()


def flops(program: Any) -> float:
    return float((program.cost_analysis() or {}).get("flops", 0.0))


def _examples(each: int, operations: float) -> int:
    """The number of a replica's `each` examples that can be computed in `LONG` seconds."""
    possible = LONG * FLOPS_PER_CORE * (psutil.cpu_count(logical=False) or 1)
    return max(1, min(each, int(each * possible / operations))) if operations else each


def _smaller(programs: StepPrograms, examples: int) -> StepPrograms:
    recipe = dataclasses.replace(programs.recipe, batch=examples * programs.recipe.replicas)
    layout = dataclasses.replace(programs.layout, batch=recipe.batch)
    return step_programs(recipe, layout, resident=programs.resident)


def _zero(aval: Any) -> jax.Array:
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=str(aval.dtype)[4:-1])
    return jnp.zeros(aval.shape, aval.dtype)


def seconds(program: Any) -> float:
    """The seconds of a call of a compiled program, with zeros."""
    with jax.default_device(_cpu()):
        arguments = jax.tree.map(_zero, program.in_avals[0])
        return _median(lambda: jax.block_until_ready(program(*arguments)))


def _median(call: Callable[[], Any]) -> float:
    """The median seconds of a few calls, after a first one that counts only if it took long."""
    taken: list[float] = []
    while len(taken) <= CALLS and sum(taken) < ENOUGH:
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:] or taken)


def _reduction(programs: StepPrograms) -> float:
    if programs.calls == 1:
        return 0.0
    run = reducer(Mesh(np.asarray([_cpu()]), (AXIS,)), programs.layout.exact)
    vectors = [jnp.zeros(programs.size, jnp.float32)] * programs.local_vectors
    return _median(lambda: jax.block_until_ready(run(vectors))) * programs.calls / programs.local_vectors
