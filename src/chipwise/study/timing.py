"""Times the steps of a session, and computes the rest of a record: the subject, the devices, and
the memory and FLOPs of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import jax

from ..base import DivergedError
from ..data.synthetic import Synthetic
from ..data.watch import Watch
from ..machine.hosts import hosts
from ..machine.limits import peak_bytes
from ..machine.record import Series
from ..recipe.recipe import Recipe
from ..recipe.task import finished
from ..run.meter import share_of_peak
from ..run.placement import describe
from ..run.progress import Reporter
from ..run.session import Session

SECONDS = 10.0  # all timed intervals together
INTERVAL_SECONDS = 0.5  # far longer than the wait at its end
INTERVALS = 10  # at least; quartiles of fewer say little
_CALIBRATION_SECONDS = 0.1


def timed(session: Session, steps: int) -> float:
    """Runs `steps` steps and waits until they are done. *Returns* the seconds."""
    began = time.perf_counter()
    session.advance(steps)
    session.wait()
    return time.perf_counter() - began


def intervals(
    seconds_a_step: float, steps: int | None = None, seconds: float = SECONDS
) -> list[int]:
    """The number of steps of each interval: about `INTERVAL_SECONDS` each, and at least `INTERVALS`
    intervals.

    *Arguments:* `steps`: the number of all steps. If there are fewer than `INTERVALS`, each is an
    interval. None means as many as take about `seconds`. Intervals are equally long. With `steps`,
    the last one also gets the remaining steps.
    """
    if steps is None:
        number = max(INTERVALS, round(seconds / INTERVAL_SECONDS))
        each = max(1, round(min(INTERVAL_SECONDS, seconds / number) / max(seconds_a_step, 1e-9)))
        return [each] * number
    number = min(steps, max(INTERVALS, round(steps * seconds_a_step / INTERVAL_SECONDS)))
    each = steps // number
    number = steps // each
    return [each] * (number - 1) + [each + steps % each]


def first_losses(session: Session, steps: int) -> list[float]:
    """The mean loss of each of the next `steps`, read when all are done."""
    sums = []
    for _ in range(steps):
        session.advance()
        sums.append(session.drain()["loss"])
    return [_finite(s, number, number) for number, s in enumerate(jax.device_get(sums), start=1)]


def mean_loss(session: Session, first: int) -> float:
    """The mean loss of the steps since `first`, that is, since the loss was last read. Waits."""
    return _finite(jax.device_get(session.drain()["loss"]), first, session.step)


def seconds_a_step(session: Session) -> float:
    """The length of a step, measured over as many steps as needed."""
    steps = 1
    first = session.step + 1
    timed(session, steps)  # not counted: the first call after a wait
    while True:
        taken = hosts().agree("calibration", timed(session, steps))
        if taken >= _CALIBRATION_SECONDS:
            mean_loss(session, first)
            return taken / steps
        # The first stretches are too short to extrapolate far
        steps = min(4 * steps, math.ceil(1.2 * steps * _CALIBRATION_SECONDS / taken))


def _finite(loss: Any, first: int, last: int) -> float:
    value = float(finished({"loss": loss})["loss"])
    if not math.isfinite(value):
        raise DivergedError(
            "bench-loss-not-finite", value=str(value), first=first, last=last, steps=(first, last)
        )
    return value


def time_intervals(
    session: Session, counts: list[int], reporter: Reporter
) -> tuple[float, dict[str, Series], dict[str, Any]]:
    """Times intervals of the given numbers of steps. Waits and checks the loss after each.

    *Returns* the seconds of all intervals, figures with a value for each interval, and more plain
    JSON values.
    """
    stream = session.watch.stream
    batch = session.recipe.batch
    warm = session.step
    watch = Watch(session.recipe.task.train, stream)  # resets the waiting time
    reporter.start(0, sum(counts))
    seconds = []
    waits = []
    speeds = []
    for steps in counts:
        waited = watch.waited
        seconds.append(timed(session, steps))
        waits.append(min(seconds[-1], watch.waited - waited))
        speeds.append(steps / seconds[-1])
        row = {
            "step": session.step - warm,
            "train/loss": mean_loss(session, session.step - steps + 1),
        }
        reporter.update({**row, "examples_per_second": speeds[-1] * batch})
    reporter.stop()
    figures = {
        "steps_per_second": Series("steps/s", tuple(speeds)),
        "examples_per_second": Series("examples/s", tuple(speed * batch for speed in speeds)),
    }
    if stream is not None:  # otherwise the device never waits
        shares = tuple(wait / taken for wait, taken in zip(waits, seconds, strict=True))
        figures["wait_data_share"] = Series("1", shares)
    measured = {
        "timed_steps": sum(counts),
        "steps_per_interval": counts[0],
        "wait_data_share": sum(waits) / sum(seconds),
        "feed": watch.report(sum(counts), batch, sum(seconds)),
    }
    return sum(seconds), figures, measured


# ---- what a record says besides speeds


def subject(recipe: Recipe, more: Mapping[str, Any] | None) -> dict[str, Any]:
    """The recipe and its data as plain JSON values. *Arguments:* `more`: values that are added, or
    that replace these."""
    return {
        "framework": "chipwise",
        "recipe": recipe.describe(),
        "set": [],
        "data": "synthetic" if isinstance(recipe.task.train, Synthetic) else "real",
        "precision": recipe.precision,
        **(more or {}),
    }


def account(session: Session, steps_per_second: float) -> dict[str, Any]:
    """The chip's name in the catalogue, how the session's devices share the work, the memory and
    FLOPs of a step, and the share of the chip's peak, as plain JSON values."""
    flops = session.programs.flops_per_step_per_device or None
    chip = session.machine.listed
    share = share_of_peak(flops, steps_per_second, chip, session.recipe.precision)
    return {
        "chip": None if chip is None else chip.names[0],
        "batch": session.layout.batch,
        "replicas": session.layout.replicas,
        "exact": session.layout.exact,
        "devices": describe(session.machine, session.layout),
        "parameters": session.describe()["parameters"],
        "compilation_cache": bool(getattr(jax.config, "jax_compilation_cache_dir", None)),
        "memory_bytes_per_device": by_category(session),
        "host_peak_bytes": peak_bytes(),
        "flops_per_step_per_device": flops,
        "share_of_peak": share,
    }


def by_category(session: Session) -> dict[str, int | None]:
    """The memory of one device in bytes, by category.

    *Returns*

    - `parameters` (with their average), `optimizer` and `state`.
    - `data`: examples, and two windows of indices and rates.
    - `temporaries`: those of the program that needs most, with the replicas' sums.
    - `program`: code.
    - `peak_measured` and `available`: the device's own figures.

    `None` means unknown, as on a CPU.
    """
    programs = session.programs
    made = session.programs.blueprint
    known = {name: a for name, one in programs.executables.items() if (a := one.memory_analysis())}
    stats = session.placement.lead.memory_stats() or {}
    return {
        "parameters": made.parameter_bytes,
        "optimizer": made.optimizer_bytes,
        "state": made.state_bytes,
        "data": made.data_bytes,
        "temporaries": sum(made.peak({n: a.temp_size_in_bytes for n, a in known.items()}))
        if known
        else None,
        # 0 on the CPU
        "program": sum(a.generated_code_size_in_bytes for a in known.values()) or None,
        "peak_measured": stats.get("peak_bytes_in_use"),
        "available": stats.get("bytes_limit"),
    }
