"""Measures how fast a recipe trains on this machine, and writes a record.

The first steps are those of a fresh run. The record has their losses, which two records of the same
training share, and `compare` notes those that are not finite. Timed intervals follow. The host
waits for the device only between them. There are no evaluations, checkpoints or logs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..base import RecipeError, fact
from ..base.annotations import as_annotated
from ..machine.arithmetic import fixed
from ..machine.gpu_state import Watched
from ..machine.record import Record
from ..recipe.recipe import Recipe
from ..run.meter import Meter
from ..run.on import ALL, On
from ..run.progress import Reporter
from ..run.session import Session
from .timing import (
    SECONDS,
    account,
    first_losses,
    intervals,
    seconds_a_step,
    subject,
    time_intervals,
)

WARMUP = 50  # steps before the timed ones; their losses are kept


@as_annotated
@fixed()
def measure_train(
    recipe: Recipe,
    *,
    steps: int | None = None,
    seconds: float = SECONDS,
    warmup: int = WARMUP,
    on: On = ALL,
    progress: str = "auto",
    began: float | None = None,
    described: Mapping[str, Any] | None = None,
) -> Record:
    """Measures how fast `recipe` trains, with its own data, order, augmentation and schedules.

    *Arguments:*

    - `steps`: the number of timed steps. By default as many as take about `seconds`.
    - `warmup`: untimed steps, started one by one. The record has their losses. Then
      `calibration_steps` measure the length of a step, for a tenth of a second or a few times that.
    - `on` and `progress`: as in `fit`.
    - `began`: the start of the start-up time, from `time.perf_counter()`. By default this call.
    - `described`: more about the recipe's origin, plain JSON values for the record.

    If the recipe is shorter, training continues with the last values of its schedules.

    *Returns* a record of the kind "train" with these figures, a value for each interval:
    `steps_per_second`, `examples_per_second` (global) and, if data is streamed, `wait_data_share`,
    the share of the time in which the device waited for data. `docs/bench.md` describes `measured`.

    Raises `RecipeError`, `DataError` or `DeviceError` before anything is compiled. Raises
    `DivergedError` for a loss that is not finite, with the step if it is one of the first.
    """
    if not (
        1 <= warmup <= 1e9
        and 1 <= (1 if steps is None else steps) <= 1e9
        and 0 < seconds < math.inf
    ):
        raise RecipeError("bench-nothing-to-time", steps=steps, seconds=seconds, warmup=warmup)
    if not recipe.clock.total:
        raise RecipeError("recipe-without-steps", recipe=recipe.name, duration=recipe.duration)
    meter = Meter(recipe.batch) if began is None else Meter(recipe.batch, began)
    with contextlib.ExitStack() as closing:
        # ---- devices, data, state and programs, as in `fit`
        reporter = Reporter(progress)
        closing.callback(reporter.stop)
        session = closing.enter_context(Session(recipe, on))
        reporter.introduce(session.start, session.warnings)
        session.begin(recipe=recipe.endless())
        reporter.say(session.data)
        session.wait()
        meter.seconds["start"] = meter.total()
        with meter.section("compile"):
            session.compile(recipe.clock.total)

        # ---- the first steps, then intervals of a length that they tell
        with meter.section("warmup"):
            losses = first_losses(session, warmup)
            each = seconds_a_step(session)
        warm = session.step
        counts = intervals(each, steps, seconds)
        reporter.say(
            fact(
                "bench-begins",
                warmup=warmup,
                calibration=warm - warmup,
                timed=sum(counts),
                each=counts[0],
            )
        )
        with Watched(session.placement.devices) as watched:
            meter.seconds["timed"], figures, more = time_intervals(session, counts, reporter)

        # ---- the record
        sections = ("start", "compile", "warmup", "timed")
        measured = {
            "data_note": "",
            **subject(recipe, described),
            **account(session, figures["steps_per_second"].median),
            **more,
            "warmup_steps": warm,
            "calibration_steps": warm - warmup,
            "seconds": {name: round(meter.seconds[name], 6) for name in sections},
            "first_losses": losses,
            "gpus": {str(number): asdict(state) for number, state in watched.states.items()},
        }
    name = (
        recipe.name.removesuffix("-synthetic") if measured["data"] == "synthetic" else recipe.name
    )
    return Record.now("train", name, measured, figures, session.placement.devices)
