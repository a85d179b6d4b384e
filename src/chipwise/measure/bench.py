"""How fast a recipe trains on this machine, what that speed was made of, and the record of it.

The first steps are those of a fresh run: their losses are kept, so that two records can be checked to be of
the same training before their speeds are compared. Then come timed intervals; only between them does the host
wait for the device. What is not training, such as evaluation or checkpoints, does not take place.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from ..data.synthetic import Synthetic
from ..data.watch import Watch
from ..engine import feed
from ..engine.agenda import MANY
from ..engine.meter import share_of_peak
from ..engine.on import ALL, On
from ..engine.placement import describe
from ..engine.progress import Reporter
from ..engine.session import Session
from ..errors import DivergedError, RecipeError
from ..machine.fingerprint import this_machine
from ..planner.hlo_proto import program_bytes
from ..recipe.recipe import Recipe
from ..recipe.task import finished
from ..words.figures import counted
from .memory import by_category, host_peak_bytes
from .profile import capture, explain, make_folder
from .record import Record, Series

WARMUP = 50  # steps before the clock, whose losses are kept
SECONDS = 10.0  # of all timed intervals
INTERVAL_SECONDS = 0.5  # long beside the wait at its end, short beside what disturbs a machine
INTERVALS = 10  # at least: quartiles of fewer say little
_CALIBRATION_SECONDS = 0.1


def measure_train(
    recipe: Recipe,
    *,
    steps: int | None = None,
    seconds: float = SECONDS,
    warmup: int = WARMUP,
    on: On = ALL,
    profile: str | Path | None = None,
    progress: str = "auto",
    began: float | None = None,
    described: Mapping[str, Any] | None = None,
) -> Record:
    """Measures the training of `recipe` as it is: its own data, order, augmentation and schedules.

    *Arguments:*

    - `steps`: timed steps; otherwise as many as take about `seconds`.
    - `warmup`: steps before the clock, begun one by one; their losses are kept. More follow, of a tenth of a
      second or a few times that, to learn how long a step takes (`calibration_steps`).
    - `on` and `progress` as in `fit`.
    - `profile`: a folder for a trace of some further steps, made when the clock has stopped.
    - `began`: `time.perf_counter()` from which the start-up counts; otherwise this call.
    - `described`: more about the recipe's origin, plain JSON values for the record.

    A recipe that ends earlier goes on in the same order of examples, with the last values of its schedules.

    *Returns* a record of the kind "train" with one run an interval of these figures: `steps_per_second`,
    `examples_per_second` (global) and, where data is streamed, `wait_data_share`, the share of the time in
    which the device had nothing to do but wait for it. `docs/bench.md` names what `measured` holds.

    Raises `RecipeError`, `DataError` or `DeviceError` before anything is compiled; `DivergedError` for a
    loss that is not finite, naming the step where it is one of the first.
    """
    began = time.perf_counter() if began is None else began
    if warmup < 1 or (steps is not None and steps < 1) or not 0 < seconds < math.inf:
        raise RecipeError(
            f"steps={steps}, seconds={seconds:g}, warmup={warmup}: expected at least one step of each and "
            f"more than 0 seconds."
        )
    if not recipe.clock.total:
        raise RecipeError(
            f'Recipe {recipe.name} lasts "{recipe.duration}", no step at all: give it a longer duration.'
        )
    if profile is not None:
        make_folder(profile)
    reporter, task = Reporter(progress), recipe.task
    longer = recipe.endless()
    spent: dict[str, float] = {}
    # Windows as long as those of `fit`, so that the program is the same, for compilation caches too
    at_once = 1 if recipe.clock.total < MANY else None  # as `fit` does
    with contextlib.ExitStack() as closing:
        closing.callback(reporter.stop)
        session = closing.enter_context(
            Session(longer, on, steps_per_call=at_once, window=feed.window_length(recipe))
        )
        machine, layout, program = session.machine, session.layout, session.programs
        reporter.say(session.start)
        for warning in [*session.layout_warnings, *recipe.warnings()]:
            reporter.warn(str(warning))
        session.begin()
        reporter.say(session.data)
        session.wait()
        spent["start"] = time.perf_counter() - began

        began = time.perf_counter()
        decided = session.compile(trial=at_once is None)
        if decided is not None:
            reporter.say(decided)
        spent["compile"] = time.perf_counter() - began

        began = time.perf_counter()
        losses = _first_losses(session, warmup)
        each = _seconds_a_step(session)
        spent["warmup"] = time.perf_counter() - began
        warm = session.step

        counts = intervals(each, steps, seconds)
        reporter.say(
            f"{counted(warmup, 'step')} of warm-up and {warm - warmup} of calibration done; "
            f"{counted(sum(counts), 'timed step')} follow{'s' * (sum(counts) == 1)}, {counts[0]} at a time"
        )
        stream = session.watch.stream
        watch = Watch(task.train, None if stream is None else _Since(stream))  # type: ignore[arg-type]
        reporter.start(0, sum(counts))
        timed, waits = [], []
        for steps_now in counts:
            waited, now = watch.waited, time.perf_counter()
            session.advance(steps_now)
            session.wait()
            timed.append(time.perf_counter() - now)
            waits.append(min(1.0, (watch.waited - waited) / timed[-1]))
            loss = _loss(session, f"between steps {session.step - steps_now + 1} and {session.step}")
            done = {"step": session.step - warm, "train/loss": loss}
            reporter.update(done | {"examples_per_second": steps_now * recipe.batch / timed[-1]})
        reporter.stop()
        spent["timed"] = sum(timed)
        fed = watch.report(sum(counts), recipe.batch, spent["timed"])
        memory = by_category(program, *session.held())
        peak = host_peak_bytes()

        profiled = None
        if profile is not None:
            each_call = session.steps_at_once
            shown = traced_calls(each_call * spent["timed"] / sum(counts))
            trace = capture(profile, shown, functools.partial(session.advance, each_call), session.wait)
            profiled = explain(
                trace, [program_bytes(made) for made in program.executables], shown * each_call
            )

    speeds = [n / taken for n, taken in zip(counts, timed, strict=True)]
    flops = program.flops_per_step_per_device or None
    share = share_of_peak(flops, float(np.median(speeds)), machine.kind, recipe.precision)
    synthetic = isinstance(task.train, Synthetic)
    figures = {
        "steps_per_second": Series("steps/s", tuple(speeds)),
        "examples_per_second": Series("examples/s", tuple(speed * recipe.batch for speed in speeds)),
    }
    if stream is not None:
        figures["wait_data_share"] = Series("1", tuple(waits))
    return Record(
        kind="train",
        name=recipe.name.removesuffix("-synthetic") if synthetic else recipe.name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        measured={
            "framework": "chipwise",
            "recipe": recipe.describe(),
            "set": [],
            "data": "synthetic" if synthetic else "real",
            "data_note": "",
            **(described or {}),
            "batch": recipe.batch,
            "replicas": recipe.replicas,
            "precision": recipe.precision,
            "exact": layout.exact,
            "devices": describe(machine, layout),
            "parameters": session.describe()["parameters"],
            "warmup_steps": warm,
            "calibration_steps": warm - warmup,
            "timed_steps": sum(counts),
            "steps_per_interval": counts[0],
            "steps_per_call": program.steps_at_once,
            "seconds": {name: round(value, 6) for name, value in spent.items()},
            "compilation_cache": bool(getattr(jax.config, "jax_compilation_cache_dir", None)),
            "first_losses": losses,
            "wait_data_share": sum(w * t for w, t in zip(waits, timed, strict=True)) / spent["timed"],
            "feed": fed,
            "memory_bytes_per_device": memory,
            "host_peak_bytes": peak,
            "flops_per_step_per_device": flops,
            "share_of_peak": None if isinstance(share, str) else share,
            "profile": profiled,
        },
        figures=figures,
        machine=this_machine(session.placement.devices),
    )


def intervals(seconds_a_step: float, steps: int | None = None, seconds: float = SECONDS) -> list[int]:
    """How many steps each timed interval has: of about `INTERVAL_SECONDS`, and at least `INTERVALS` of them.

    *Arguments:* `steps`: in all; fewer than `INTERVALS` are an interval each. Otherwise as many as take about
    `seconds`. All intervals are of the same length, but for what is left over, which the last one gets.
    """
    if steps is None:
        number = max(INTERVALS, round(seconds / INTERVAL_SECONDS))
        each = max(1, round(min(INTERVAL_SECONDS, seconds / number) / max(seconds_a_step, 1e-9)))
        return [each] * number
    number = min(steps, max(INTERVALS, round(steps * seconds_a_step / INTERVAL_SECONDS)))
    each = steps // number
    number = steps // each
    return [each] * (number - 1) + [each + steps % each]


def traced_calls(seconds_a_call: float) -> int:
    """How many calls of the step a trace shows: about half a second, so that its file stays small."""
    return max(3, min(20, round(0.5 / seconds_a_call)))


def _first_losses(session: Session, steps: int) -> list[float]:
    """The mean loss of each of the next `steps`, read when all are done."""
    sums = []
    for _ in range(steps):
        session.advance()
        sums.append(session.drain()["loss"])
    return [_finite(s, f"in step {number}") for number, s in enumerate(jax.device_get(sums), start=1)]


def _loss(session: Session, when: str) -> float:
    """The mean loss since the last call. Waits."""
    return _finite(jax.device_get(session.drain()["loss"]), when)


def _seconds_a_step(session: Session) -> float:
    """Measured over as many steps as take a while, and few more."""
    steps = 1
    session.advance(steps)  # not timed: the first call after a wait, and that of several steps at once
    session.wait()
    while True:
        began = time.perf_counter()
        session.advance(steps)
        session.wait()
        taken = time.perf_counter() - began
        if taken >= _CALIBRATION_SECONDS:
            _loss(session, f"up to step {session.step}")
            return taken / steps
        # The first stretches are too short to tell by how much
        steps = min(4 * steps, math.ceil(1.2 * steps * _CALIBRATION_SECONDS / taken))


class _Since:
    """The account of a stream from now on: what was waited for before the clock started is not its part."""

    def __init__(self, stream: Any):
        self._stream = stream
        self._waited, self._delivered = stream.waited, stream.delivered
        self._seconds = dict(stream.stages.seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def waited(self) -> float:
        return self._stream.waited - self._waited

    @property
    def delivered(self) -> int:
        return self._stream.delivered - self._delivered

    @property
    def stages(self) -> SimpleNamespace:
        now = self._stream.stages.seconds
        return SimpleNamespace(seconds={name: now[name] - before for name, before in self._seconds.items()})


def _finite(loss: Any, when: str) -> float:
    value = finished({"loss": loss})["loss"]
    if not np.isfinite(value):
        raise DivergedError(
            f"The training loss became {value} {when}: no record is written. Try a lower rate "
            f"(--set lr=...), gradient clipping (--set clip=1.0) or precision f32."
        )
    return float(value)
