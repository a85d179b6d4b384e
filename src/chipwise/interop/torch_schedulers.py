"""Converts a PyTorch scheduler to schedules of a group's rate and, for `OneCycleLR`, of its momentum."""

from __future__ import annotations

from typing import Any

from ..errors import RecipeError
from ..recipe.schedule import Schedule
from ..recipe.torch_schedules import KINDS, torch_scheduler

_UNITS = {"step": "st", "epoch": "ep"}


def rate_of(scheduler: Any, group: int, settings: dict[str, Any], step: str | None) -> float | Schedule:
    """The rate of parameter group `group`: a schedule, or a number without a scheduler.

    *Arguments:* `settings`: PyTorch's dict of the group; `step`: how often the scheduler is stepped, "step"
    or "epoch". Raises `RecipeError` for a scheduler without a counterpart here, or one that was stepped.
    """
    if scheduler is None:
        return float(settings["lr"])
    return _read(scheduler, group, settings, _unit(scheduler, step))


def momentum_of(
    scheduler: Any, group: int, settings: dict[str, Any], step: str | None, fixed: float
) -> float | Schedule:
    """The momentum, or Adam's `b1`: `fixed`, unless a `OneCycleLR` cycles it."""
    if type(scheduler).__name__ != "OneCycleLR" or not scheduler.cycle_momentum:
        return fixed
    low, high = float(settings["base_momentum"]), float(settings["max_momentum"])
    return torch_scheduler("OneCycleLR", low, _cycle(scheduler, _unit(scheduler, step), high, high))


def _unit(scheduler: Any, step: str | None) -> str:
    if step not in _UNITS:
        raise RecipeError("torch-scheduler-step", kind=type(scheduler).__name__, given=repr(step))
    return _UNITS[step]


def _read(scheduler: Any, group: int, settings: dict[str, Any], unit: str) -> torch_scheduler:
    kind = type(scheduler).__name__
    if kind not in KINDS or not type(scheduler).__module__.startswith("torch.optim"):
        raise RecipeError("torch-scheduler-unknown", kind=kind, known=list(KINDS))
    if scheduler.last_epoch > 0:
        raise RecipeError("torch-scheduler-used", kind=kind, steps=scheduler.last_epoch)
    if kind == "OneCycleLR":
        peak, low, end = (float(settings[name]) for name in ("max_lr", "initial_lr", "min_lr"))
        return torch_scheduler(kind, peak, _cycle(scheduler, unit, low, end))
    base = float(settings["initial_lr"])
    if kind == "SequentialLR":
        inner = [(str(i), _read(one, group, settings, unit)) for i, one in enumerate(scheduler._schedulers)]
        milestones = ", ".join(f"{m}{unit}" for m in scheduler._milestones)
        return torch_scheduler(kind, base, {"milestones": milestones, "schedulers": tuple(inner)})
    if kind == "MultiStepLR":
        milestones = ", ".join(f"{m}{unit}" for m in sorted(scheduler.milestones.elements()))
        own: dict[str, Any] = {"milestones": milestones, "gamma": float(scheduler.gamma)}
    elif kind == "StepLR":
        own = {"every": f"{scheduler.step_size}{unit}", "gamma": float(scheduler.gamma)}
    elif kind == "CosineAnnealingLR":
        own = {"eta_min": float(scheduler.eta_min), "until": f"{scheduler.T_max}{unit}"}
    else:
        factors = {name: float(getattr(scheduler, name)) for name in ("start_factor", "end_factor")}
        own = {**factors, "until": f"{scheduler.total_iters}{unit}"}
    return torch_scheduler(kind, base, own)


def _cycle(scheduler: Any, unit: str, start: float, end: float) -> dict[str, Any]:
    phases = scheduler._schedule_phases
    total = scheduler.total_steps
    return {
        "start": start,
        "end": end,
        "total": f"{total}{unit}",
        "pct_start": (float(phases[0]["end_step"]) + 1) / total,
        "shape": scheduler._anneal_func_type,
        "three_phase": len(phases) == 3,
    }
