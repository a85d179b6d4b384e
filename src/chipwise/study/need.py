"""What a step needs of the memory of a device that is here: asked of that device's own compiler."""

from __future__ import annotations

from typing import Any

import jax

from ..data.sources import nbytes
from ..engine import loader
from ..engine.layout import Layout
from ..engine.step import compiler_options
from ..machine.detect import Machine
from ..machine.limits import memory as host_memory
from ..planner.plans import Memory
from ..planner.programs import Traceable, step_programs, tracing
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact


def available(machine: Machine, devices: int) -> tuple[int, Fact]:
    """Bytes that one of `devices` devices has free, and whose they are.

    A CPU has no memory of its own: its devices share what the host has free.
    """
    device = machine.devices[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0), fact(
            "memory-free-on-device", device=machine.kind
        )
    source = fact("memory-free-shared", devices=devices) if devices > 1 else fact("memory-free-on-host")
    return host_memory().available_bytes // devices, source


def needed(recipe: Recipe, machine: Machine, layout: Layout) -> Memory:
    """Bytes of one device while `recipe` trains in `layout`, by what they hold. Compiles the programs of
    the step and runs nothing.

    The evaluation counts with the data that it keeps on the device; its batch, it fits to what is left.

    Raises `RecipeError` when the recipe's own functions raise while they are traced.
    """
    device, task = machine.devices[0], recipe.task
    limit = (device.memory_stats() or {}).get("bytes_limit")
    programs = step_programs(recipe, layout, resident=loader.fits(task.train, limit))
    free, source = available(machine, layout.devices)
    with tracing(recipe.name):
        made = [_compiled(program, device, layout) for program in (programs.replica, programs.update)]
    known = [analysis for analysis in (one.memory_analysis() for one in made) if analysis is not None]
    evaluation = nbytes(task.eval) if task.eval is not None and loader.fits(task.eval, limit) else 0
    return Memory(
        parameters=programs.parameter_bytes,
        optimizer=programs.optimizer_bytes,
        state=programs.state_bytes,
        replica_sums=programs.replica_sum_bytes,
        activations=max((analysis.temp_size_in_bytes for analysis in known), default=0),
        data=programs.data_bytes + evaluation,
        program=sum(analysis.generated_code_size_in_bytes for analysis in known),
        available=free,
        available_source=source,
    )


def _compiled(program: Traceable, device: jax.Device, layout: Layout) -> Any:
    here = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), program.specs)
    options = compiler_options(device.platform, layout.exact)
    jitted = jax.jit(program.function, donate_argnums=program.donate, compiler_options=options)
    return jitted.lower(*shapes).compile()
