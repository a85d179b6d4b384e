"""A step on the target `cpu`, this machine: its programs are compiled here, and a few calls are timed.

Examples are zeros, so no data is read. Programs that do not fit in memory are not run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..chips.targets import Target
from ..engine.blueprint import tracing
from ..engine.reduce import AXIS, reducer
from ..words.facts import fact
from . import device_memory
from .plans import Range
from .time_step import StepTime, called, dispatch_seconds
from .tracing import BLOCK, EVALUATION, ONE, TracedStep, predicts

OTHER_HOST = 2.0
"""The factor, down and up, of compilation seconds: they were measured on this host, not on the target's."""

CALLS, ENOUGH = 3, 2.0
"""The number of timed calls of a program, and the seconds after which no further call is made."""

AROUND = 1.4
"""The factor, down and up, of seconds measured with zeros on a machine that does other things too. Runs of
one program differ by a fifth (`benchmarks/overhead.md`)."""


def compiled_here(step: TracedStep, target: Target) -> tuple[StepTime, dict[str, Any]]:
    """The step as compiled for one device of this host's CPU, without its time, and its programs by name."""
    start = time.perf_counter()
    with jax.default_device(_cpu()), tracing(step.recipe.name):
        compiled: dict[str, Any] = {
            one.name: jax.jit(one.function).lower(*one.specs).compile() for one in step.programs
        }
    compilation = Range.around(time.perf_counter() - start, OTHER_HOST)
    temporary = {n: c.memory_analysis().temp_size_in_bytes for n, c in compiled.items() if n != ONE}
    first = step.programs[0]
    made = StepTime(
        method="measured",
        memory=device_memory.memory(step, target, temporary, 0),
        flops=step.calls * float((compiled[first.name].cost_analysis() or {}).get("flops", 0.0)),
        dtypes=first.contents(target.chip).dtypes,
        notes=(fact("measured-here"),),
        compile_seconds=compilation,
    )
    return made, compiled


def timed_here(step: TracedStep, target: Target) -> StepTime:
    """The step with measured times; without, if it does not fit."""
    made, compiled = compiled_here(step, target)
    if made.memory is not None and not made.memory.fits:
        return made
    with jax.default_device(_cpu()):
        if predicts(step):
            parts = {"forward": _seconds(compiled[BLOCK])}
            one = called(step.programs[0], Range.around(_seconds(compiled[ONE]), AROUND))
            made = replace(made, latency=one)
        else:
            if EVALUATION in compiled:
                block = Range.around(_seconds(compiled.pop(EVALUATION)), AROUND)
                made = replace(made, evaluation=called(step.programs[-1], block))
            parts = {
                "replica": step.calls * _seconds(compiled.pop("replica")),
                "reduce": _reduction(step),
                "update": sum(map(_seconds, compiled.values())),
            }
    return made.timed(parts, (1 / AROUND, AROUND), dispatch_seconds(step, target), "compute")


def _cpu() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]


def _zero(aval: Any) -> jax.Array:
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=str(aval.dtype)[4:-1])
    return jnp.zeros(aval.shape, aval.dtype)


def _seconds(program: Any) -> float:
    """The seconds of a call of a compiled program, with zeros."""
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


def _reduction(step: TracedStep) -> float:
    if step.calls == 1:
        return 0.0
    run = reducer(Mesh(np.asarray([_cpu()]), (AXIS,)), step.layout.exact)
    vectors = [jnp.zeros(step.size, jnp.float32)] * step.local_vectors
    return _median(lambda: jax.block_until_ready(run(vectors))) * step.calls / step.local_vectors
