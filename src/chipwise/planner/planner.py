"""`plan`: a recipe and a list of targets in, a list of `Plan` out, from whatever machine this is.

TPUs: the step's own programs are given to the TPU's compiler, and its cycles are the time. GPUs, CPUs,
and TPUs where the compiler is not installed: the programs are traced and timed operation by operation.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..chips.catalogue import peak_flops_per_device
from ..chips.prices import Price, prices_for
from ..chips.prices import load as load_prices
from ..chips.targets import Target, parse
from ..engine import feed
from ..engine.layout import Layout, exact_counts, usable
from ..errors import DeviceError
from ..machine.detect import leave_compiler_alone
from ..recipe.check import SUBLANES
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact
from . import steps
from .compiler import libtpu_available
from .feeding import HostSpeed, feeding, measured, recorded
from .kernels import costliest
from .plans import Cost, Feeding, Memory, Plan, Range
from .programs import StepPrograms, available, largest_batch, step_programs
from .timing import StepTime, at_least, run_time

Progress = Callable[[int, int, str], None]


def plan(
    recipe: Recipe,
    on: Sequence[str],
    *,
    prices: Sequence[Price] | str | Path | None = None,
    exact: bool = True,
    find_largest_batch: bool = False,
    measure_feed: bool = False,
    feed_record: str | os.PathLike | None = None,
    host_cores: int | None = None,
    cache: str | os.PathLike | None = None,
    progress: Progress | None = None,
) -> list[Plan]:
    """Predicts `recipe` on each target of `on`, in that order.

    Touches no accelerator and writes nothing outside its cache.

    *Arguments:*

    - `on`: targets such as `"v5e-8"`, `"v3-8"`, `"a100:8"`, `"t4"`, `"cpu"`; see `chipwise.chips.targets`.
    - `prices`: a price file, or prices; by default the bundled snapshot.
    - `exact`: as for `fit`.
    - `find_largest_batch`: search for it on every target, not only where the recipe's does not fit.
    - `measure_feed`: read examples for half a second, to compare this host's cores with what the chips want.
    - `feed_record`: a file by `chipwise bench-feed`, maybe of another host, in the place of that measurement.
    - `host_cores`: of the targets' hosts, for feeding; by default the record's, or this host's.
    - `cache`: folder for compiled results; by default in the user's cache folder.
    - `progress`: called with (done, total, name) as programs are compiled.

    Raises `DeviceError` for an unknown or impossible target, `RecipeError` for a recipe that cannot be
    traced, `DataError` for a `feed_record` that cannot be read or is of other examples.
    """
    leave_compiler_alone()
    targets = list({t.name: t for t in map(parse, on)}.values())
    if not targets:
        raise DeviceError("no-target")
    host = None if feed_record is None else recorded(feed_record, recipe.task.train)
    table = load_prices(prices) if prices is None or isinstance(prices, str | Path) else prices
    folder = Path(cache) if cache is not None else None
    compiler = libtpu_available()

    # ---- each target's layout and programs; targets with the same layout share them
    programs_of: dict[tuple[int, bool], StepPrograms] = {}
    cases: list[tuple[Target, StepPrograms]] = []
    for target in targets:
        key = usable(recipe.replicas, target.devices, exact), _resident(recipe, target)
        if key not in programs_of:
            programs_of[key] = _programs(recipe, target, exact)
        cases.append((target, programs_of[key]))

    # ---- what the compiler or the model says
    compilable = [(t, p) for t, p in cases if t.chip.kind == "TPU" and compiler is not None]
    answers = iter(steps.compile_steps(compilable, cache=folder, progress=progress))
    if host is None and measure_feed and any(not p.resident for _, p in cases):
        host = measured(recipe.task.train)
    plans = []
    for target, programs in cases:
        by_compiler = target.chip.kind == "TPU" and compiler is not None
        step = _timed(target, programs, next(answers) if by_compiler else None)
        largest = None
        if find_largest_batch or (step.memory is not None and not step.memory.fits):

            def fits(tried: Recipe, target=target, by_compiler=by_compiler) -> tuple[bool, float]:
                again = _programs(tried, target, exact)
                answers = steps.compile_steps([(target, again)], cache=folder)[0] if by_compiler else None
                step = _timed(target, again, answers)
                if step.memory is None:
                    return step.problem is None, 1.0
                return step.memory.fits, step.memory.needed / step.memory.available

            largest = largest_batch(recipe, fits, recipe.clock.examples)
        plans.append(_assemble(recipe, target, programs, step, largest, table, host, host_cores))
    return plans


def _timed(target: Target, programs: StepPrograms, answers: steps.Answers | None) -> StepTime:
    """By the compiler's answers; by the model where it was not asked or crashed."""
    death = next((a.problem for a in (answers or {}).values() if a.died), None)
    if answers is not None and death is None:
        step = steps.timed_by_compiler(target, programs, answers)
    else:
        step = steps.timed_by_model(target, programs)
    if death is not None:
        instead = fact("modelled-after-crash", chip=target.chip.name)
        step = dataclasses.replace(step, notes=(death, instead, *step.notes[1:]))
    if programs.fused:
        step = dataclasses.replace(step, notes=(*step.notes, fact("fused-without-exact")))
    return step


def _programs(recipe: Recipe, target: Target, exact: bool) -> StepPrograms:
    layout = Layout(recipe.batch, recipe.replicas, usable(recipe.replicas, target.devices, exact), exact)
    return step_programs(recipe, layout, resident=_resident(recipe, target))


def _resident(recipe: Recipe, target: Target) -> bool:
    """As `fit` decides: JAX knows of no limit on the CPU."""
    limit = None if target.chip.kind == "CPU" else available(target)[0]
    return feed.fits(recipe.task.train, limit)


def _assemble(
    recipe: Recipe,
    target: Target,
    programs: StepPrograms,
    step: StepTime,
    largest: int | None,
    prices: Sequence[Price],
    host: HostSpeed | None,
    host_cores: int | None,
) -> Plan:
    layout = programs.layout
    problem = lacks(target, step) or step.problem
    if problem is None and step.memory is not None and not step.memory.fits:
        problem = does_not_fit(step.memory, largest, layout, recipe.clock.examples)
    if problem is None and step.seconds is None:
        problem = fact("step-time-unknown")
    run: dict[str, Any] = {}
    if problem is None:
        assert step.seconds is not None
        speed = recipe.batch / step.seconds.value
        fed = feeding(recipe, speed, resident=programs.resident, host=host, cores=host_cores)
        run = _run(recipe, target, step, fed, prices)
    one = Plan(
        target=target.name,
        chip=target.chip.name,
        chips=target.chips,
        devices=layout.devices,
        devices_found=target.devices,
        method=step.method,
        batch=recipe.batch,
        replicas=recipe.replicas,
        replicas_per_device=layout.replicas_per_device,
        precision=recipe.precision,
        parameters=programs.parameters,
        problem=problem,
        memory=step.memory,
        largest_batch=largest,
        flops_per_step_per_device=step.flops,
        wire_bytes_per_step_per_device=step.wire_bytes,
        steps=recipe.clock.total,
        notes=step.notes if target.note is None else (*step.notes, target.note),
        **run,
    )
    return dataclasses.replace(one, advice=advice(recipe, target, programs, one, step))


def _run(
    recipe: Recipe, target: Target, step: StepTime, fed: Feeding, prices: Sequence[Price]
) -> dict[str, Any]:
    """What is known of a plan because the recipe runs there."""
    seconds, bound = step.seconds, step.bound
    assert seconds is not None
    if fed.input_bound and fed.examples_per_second_per_core is not None:
        bound = "input"
        seconds = at_least(seconds, recipe.batch / (fed.examples_per_second_per_core * fed.cores))
    peak = peak_flops_per_device(target.chip, recipe.precision)
    run = run_time(recipe, target, seconds, step.compile_seconds)
    known = prices_for(target, prices)
    # The CPU is this host, measured: what another host of so many cores costs is no price of it.
    if target.chip.kind == "CPU" and not any(p.owned for p in known):
        known = []
    return {
        "step_seconds": seconds,
        "step_parts": step.parts,
        "kernels": costliest(step.kernels),
        "bound": bound,
        "examples_per_second": seconds.inverse(recipe.batch),
        "share_of_peak": None if peak is None else step.flops / seconds.value / peak,
        "seconds": run.parts,
        "overhead_seconds": (run.overhead.low, run.overhead.high),
        "ranked_by": run.ranked_by,
        "wall_seconds": run.total,
        "feeding": fed,
        "costs": tuple(cost for price in known for cost in _costs(price, run.total)),
    }


def does_not_fit(memory: Memory, largest: int | None, layout: Layout, examples: int) -> Fact:
    numbers = {"needed": memory.needed, "available": memory.available}
    if not largest:
        return fact("no-batch-fits", **numbers, least=layout.replicas)
    code = "batch-does-not-fit" if largest + layout.replicas <= examples else "batch-of-all-fits"
    return fact(code, **numbers, largest=largest)


def _costs(price: Price, total: Range) -> Iterator[Cost]:
    """Of the run on demand and spot, as far as these are known."""
    same = ("cloud", "instance", "includes", "date", "source", "note", "reckoned", "machines")
    shared = {name: getattr(price, name) for name in same}
    for rate, spot, region in (
        (price.usd_per_hour, False, price.region),
        (price.spot_usd_per_hour, True, price.spot_region or price.region),
    ):
        if rate is not None:
            usd = total.times(rate / 3600)
            yield Cost(usd_per_hour=rate, usd=usd, spot=spot, region=region, **shared)


def advice(
    recipe: Recipe, target: Target, programs: StepPrograms, plan: Plan, step: StepTime
) -> tuple[Fact, ...]:
    """Advice for one target, most useful first; empty when there is none."""
    facts: list[Fact] = []
    if target.chip.kind == "GPU" and "float64" in step.dtypes:
        facts.append(fact("advice-float64"))
    if plan.devices != plan.devices_found:
        facts.append(_replicas(recipe, plan, programs.layout.exact))
    each = recipe.batch // recipe.replicas
    if target.chip.kind == "TPU" and each % SUBLANES:
        padded = _multiple(each, SUBLANES)
        wasted = 1 - each / padded
        facts.append(
            fact("advice-padded", each=each, padded=padded, wasted=wasted, batch=padded * recipe.replicas)
        )
    return (*facts, *_speed(recipe, plan), *step.warnings)


def lacks(target: Target, step: StepTime) -> Fact | None:
    """Why a program cannot run on a TPU that the compiler or the model would not say as plainly."""
    if target.chip.kind == "TPU" and "float64" in step.dtypes:
        return fact("tpu-without-float64")
    if target.chip.kind == "TPU" and "float16" in step.dtypes:
        return fact("tpu-without-float16")
    return None


def _replicas(recipe: Recipe, plan: Plan, exact: bool) -> Fact:
    used, devices = plan.devices, plan.devices_found
    numbers = {"replicas": recipe.replicas, "used": used, "devices": devices}
    better = replicas_for(devices, recipe.replicas, exact)
    if better is None:
        return fact("advice-devices-idle", **numbers, counts=exact_counts(recipe.replicas))
    if recipe.batch % better:
        batch = _multiple(recipe.batch, better)
        return fact("advice-replicas-and-batch", **numbers, better=better, batch=batch)
    return fact("advice-replicas", **numbers, better=better)


def replicas_for(devices: int, replicas: int, exact: bool = True) -> int | None:
    """The smallest replica count of at least `replicas` that `devices` devices can share; `None` where no
    larger count has the same bits on so many."""
    if not exact or devices & (devices - 1) == 0:
        return _multiple(replicas, devices)
    return devices if devices >= replicas else None


def _multiple(batch: int, of: int) -> int:
    return -(-batch // of) * of


def _speed(recipe: Recipe, plan: Plan) -> list[Fact]:
    facts = []
    if plan.bound == "launch":
        parts = dict(plan.step_parts)
        dispatch = parts.pop("dispatch", 0.0)
        if plan.method == "modelled" and dispatch <= sum(parts.values()):
            facts.append(fact("advice-small-kernels"))
        else:
            facts.append(fact("advice-dispatch", microseconds=dispatch * 1e6))
    if plan.bound == "input" and plan.feeding is not None and plan.feeding.cores_needed is not None:
        facts.append(fact("advice-input", needed=plan.feeding.cores_needed, cores=plan.feeding.cores))
    if plan.bound == "interconnect":
        facts.append(fact("advice-interconnect"))
    if recipe.precision == "f32" and plan.chip.startswith("TPU"):
        facts.append(fact("advice-precision"))
    if plan.replicas_per_device > 1 and plan.bound in ("launch", "memory"):
        examples = plan.batch // plan.replicas
        facts.append(fact("advice-replicas-in-turn", replicas=plan.replicas_per_device, examples=examples))
    return facts
