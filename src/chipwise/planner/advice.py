"""What to change in a recipe for a target: each piece of advice names the figure behind it."""

from __future__ import annotations

from ..chips.targets import Target
from ..engine.layout import exact_counts
from ..recipe.recipe import Recipe
from .plans import Plan
from .programs import StepPrograms
from .timing import StepTime

SUBLANES = 8  # rows of a TPU's vector registers: batches are padded to multiples of it


def advice(
    recipe: Recipe, target: Target, programs: StepPrograms, plan: Plan, step: StepTime
) -> tuple[str, ...]:
    """Advice for one target, most useful first; empty when there is none."""
    return (
        *_types(target, step),
        *_replicas(recipe, plan, programs.layout.exact),
        *_batch(recipe, target),
        *_speed(recipe, plan),
        *step.warnings,
    )


def lacks(target: Target, step: StepTime) -> str | None:
    """Why a program cannot run on a TPU that the compiler or the model would not say as plainly."""
    if target.chip.kind == "TPU" and "float64" in step.dtypes:
        return "TPUs have no float64, which the recipe computes in: use float32"
    if target.chip.kind == "TPU" and "float16" in step.dtypes:
        return 'TPUs have no float16, which the recipe computes in: use precision="bf16"'
    return None


def _types(target: Target, step: StepTime) -> list[str]:
    if target.chip.kind == "GPU" and "float64" in step.dtypes:
        return ["It computes in float64, on many GPUs a thirty-second of float32's speed: use float32."]
    return []


def _replicas(recipe: Recipe, plan: Plan, exact: bool) -> list[str]:
    used, found = plan.devices, plan.devices_found
    if used == found:
        return []
    better = replicas_for(found, recipe.replicas, exact)
    start = f"{recipe.replicas} replicas use {used} of {found} devices"
    if better is None:
        counts = ", ".join(map(str, exact_counts(recipe.replicas)))
        return [f"{start}: they can be shared by {counts} with the same bits."]
    more = f" (and --set batch={_multiple(recipe.batch, better)})" if recipe.batch % better else ""
    return [f"{start}: with --set replicas={better} all work{more}."]


def replicas_for(devices: int, replicas: int, exact: bool = True) -> int | None:
    """The smallest replica count of at least `replicas` that `devices` devices can share; `None` where no
    larger count has the same bits on so many."""
    if not exact or devices & (devices - 1) == 0:
        return _multiple(replicas, devices)
    return devices if devices >= replicas else None


def _host_waits(plan: Plan) -> bool:
    parts = dict(plan.step_parts)
    return parts.pop("dispatch", 0.0) > sum(parts.values())


def _multiple(batch: int, of: int) -> int:
    return -(-batch // of) * of


def _batch(recipe: Recipe, target: Target) -> list[str]:
    each = recipe.batch // recipe.replicas
    if target.chip.kind != "TPU" or each % SUBLANES == 0:
        return []
    padded = _multiple(each, SUBLANES)
    return [
        f"A replica's {each} examples are padded to {padded} on a TPU, {1 - each / padded:.0%} wasted: "
        f"--set batch={padded * recipe.replicas} costs about the same time a step."
    ]


def _speed(recipe: Recipe, plan: Plan) -> list[str]:
    made = []
    if plan.bound == "launch" and plan.method == "modelled" and not _host_waits(plan):
        made.append(
            "Starting its many small kernels takes most of the step: a larger batch would cost little."
        )
    elif plan.bound == "launch":
        made.append(
            f"The host needs {plan.step_parts.get('dispatch', 0) * 1e6:.0f} µs to start a step, longer than "
            f"the chip computes: a larger batch, or fewer replicas a device, would use it better."
        )
    if plan.bound == "input" and plan.feeding is not None and plan.feeding.cores_needed is not None:
        made.append(
            f"input-bound: needs {plan.feeding.cores_needed:.0f} cores, has {plan.feeding.cores}; "
            f"pack the data once and store it decoded."
        )
    if plan.bound == "interconnect":
        made.append("The replicas' sums take longer than their gradients: a larger batch hides them better.")
    if recipe.precision == "f32" and plan.chip.startswith("TPU"):
        made.append("f32 products take six passes on a TPU: --set precision=bf16 is several times faster.")
    if plan.replicas_per_device > 1 and plan.bound in ("launch", "memory"):
        made.append(
            f"A device runs its {plan.replicas_per_device} replicas one after another, "
            f"{plan.batch // plan.replicas} examples each, so that the result is the same everywhere."
        )
    return made
