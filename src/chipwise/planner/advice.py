"""What to change in a recipe for a target: each piece of advice names the figure behind it."""

from __future__ import annotations

from ..chips.targets import Target
from ..engine.layout import exact_counts
from ..recipe.recipe import Recipe
from ..words.facts import Fact, fact
from .plans import Plan
from .programs import StepPrograms
from .timing import StepTime

SUBLANES = 8  # rows of a TPU's vector registers: batches are padded to multiples of it


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
