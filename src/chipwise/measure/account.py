"""What a record says besides speeds: its subject, the devices, and the memory and FLOPs of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ..data.synthetic import Synthetic
from ..engine.meter import share_of_peak
from ..engine.placement import describe
from ..engine.session import Session
from ..machine.limits import peak_bytes
from ..recipe.recipe import Recipe


def subject(recipe: Recipe, more: Mapping[str, Any] | None) -> dict[str, Any]:
    """The recipe and its data as plain JSON values. *Arguments:* `more` of them, which counts."""
    return {
        "framework": "chipwise",
        "recipe": recipe.describe(),
        "set": [],
        "data": "synthetic" if isinstance(recipe.task.train, Synthetic) else "real",
        "precision": recipe.precision,
        **(more or {}),
    }


def account(session: Session, steps_per_second: float) -> dict[str, Any]:
    """How the session's devices share the work, the memory and FLOPs of a step, and the share of the chip's
    peak, as plain JSON values."""
    flops = session.programs.flops_per_step_per_device or None
    share = share_of_peak(flops, steps_per_second, session.machine.kind, session.recipe.precision)
    return {
        "batch": session.layout.batch,
        "replicas": session.layout.replicas,
        "exact": session.layout.exact,
        "devices": describe(session.machine, session.layout),
        "parameters": session.describe()["parameters"],
        "steps_per_call": session.steps_at_once,
        "compilation_cache": bool(getattr(jax.config, "jax_compilation_cache_dir", None)),
        "memory_bytes_per_device": by_category(session),
        "host_peak_bytes": peak_bytes(),
        "flops_per_step_per_device": flops,
        "share_of_peak": share,
    }


def by_category(session: Session) -> dict[str, int | None]:
    """The memory of one device in bytes, by category.

    *Returns* `parameters` (with their average), `optimizer`, `state`, `data` (examples, and two windows of
    indices and rates), `temporaries` of the program that needs most, with the replicas' sums, `program` code;
    and the device's own figures: `peak_measured` and `available`. `None` is unknown, as on a CPU.
    """
    programs, made = session.programs, session.programs.blueprint
    known = {name: a for name, one in programs.executables.items() if (a := one.memory_analysis())}
    stats = session.placement.lead.memory_stats() or {}
    return {
        "parameters": made.parameter_bytes,
        "optimizer": made.optimizer_bytes,
        "state": made.state_bytes,
        "data": made.data_bytes,
        "temporaries": sum(made.peak({n: a.temp_size_in_bytes for n, a in known.items()})) if known else None,
        "program": sum(a.generated_code_size_in_bytes for a in known.values()) or None,  # 0 on the CPU
        "peak_measured": stats.get("peak_bytes_in_use"),
        "available": stats.get("bytes_limit"),
    }
