"""Measures the host's time to start a compiled program on a device, by its number of arguments.

python benchmarks/dispatch.py

A plan adds it for each program of a step: if a step's programs are shorter, the chip waits for the host
("launch"-bound). The programs here do nothing. The CPU back end runs such a program within the call, so this
is an upper bound for back ends that only queue it.

It also measures several steps in one call (`fit(..., steps_per_call=16)`) on random data: on this back end a
loop around a convolution is slow, and one around small operations is not. The two alternate; the result is a
ratio.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import chipwise as cw
from chipwise.engine import dispatch, feed
from chipwise.engine.placement import Placement, lay_out
from chipwise.engine.programs import Programs
from chipwise.engine.state import first_state

RUNS, CALLS = 5, 2000


def microseconds(arguments: int) -> list[float]:
    """Microseconds of a call with so many array arguments, of which one is returned, by run."""
    values = [jnp.float32(i) for i in range(arguments)]
    compiled = jax.jit(lambda *x: x[0], keep_unused=True).lower(*values).compile()
    made = []
    for _ in range(RUNS + 1):
        before = time.perf_counter()
        for _ in range(CALLS):
            out = compiled(*values)
        jax.block_until_ready(out)
        made.append((time.perf_counter() - before) / CALLS * 1e6)
    return made[1:]  # the first warms up


def steps_in_a_call(recipe: cw.Recipe) -> tuple[float, float, list[float]]:
    """Microseconds of a single step and of one of 16 in a call, and their ratio, by run."""
    machine, layout, _ = lay_out(recipe, cw.On(devices=1, exact=False))
    placement = Placement(machine, 1)
    programs = Programs(recipe, layout, placement, resident=True)
    state = first_state(recipe)
    params = programs.functions.updates.flat.pack_host(jax.device_get(state.params))
    carry = placement.put(dataclasses.replace(state, params=params))
    data = placement.put(feed.flat(feed.read(recipe.task.train, recipe.task.classes, "training")))
    windows = feed.Windows(recipe, placement, 0, feed.window_length(recipe))
    window = windows.at(0)
    programs.compile(carry, window, data, dispatch.STEPS)

    def timed(steps: int) -> float:
        nonlocal carry
        before = time.perf_counter()
        for _ in range(0, dispatch.STEPS, steps):
            carry, token = programs.step(carry, window, data, steps)
        jax.block_until_ready((carry, token))
        return (time.perf_counter() - before) / dispatch.STEPS * 1e6

    pairs = [(timed(1), timed(dispatch.STEPS)) for _ in range(RUNS + 1)][1:]
    windows.close()
    alone, together = (statistics.median(column) for column in zip(*pairs, strict=True))
    return alone, together, [a / b for a, b in pairs]


def main() -> None:
    lines = [
        "# Starting a program",
        "",
        f"`python benchmarks/dispatch.py`; {platform.machine()} CPU, {os.cpu_count()} cores, JAX "
        f"{jax.__version__}; {RUNS} runs of {CALLS} calls, microseconds a call, median (min to max).",
        "",
        "| arguments | µs |",
        "|---|---|",
    ]
    for n in (1, 16, 64, 256):
        times = microseconds(n)
        lines.append(f"| {n} | {statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f}) |")
        print(lines[-1], flush=True)
    lines += [
        "",
        f"{RUNS} alternating runs of {dispatch.STEPS} steps, `exact=False`, 1 replica, data on the device.",
        "",
        "| recipe | batch | µs a step | of 16 in a call | times as fast (min to max) |",
        "|---|---|---|---|---|",
    ]
    for name, settings in (("digits", ["batch=8"]), ("digits", []), ("mnist", ["batch=64"])):
        recipe = cw.load(name, ["replicas=1", *settings], synthetic=True)
        alone, together, ratios = steps_in_a_call(recipe)
        lines.append(
            f"| {name} | {recipe.batch} | {alone:,.0f} | {together:,.0f} | "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
        print(lines[-1], flush=True)
    (Path(__file__).parent / "dispatch.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
