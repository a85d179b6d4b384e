"""Measures how fast a recipe trains on this machine, and writes a record.

The first steps are those of a fresh run. Their losses are kept, so that `compare` can check that two records
are of the same training before it compares speeds. Then follow timed intervals; the host waits for the device
only between them. There are no evaluations, checkpoints or logs.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
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
from ..engine.programs import Programs
from ..engine.progress import Reporter
from ..engine.session import Session
from ..engine.state import TrainState, nbytes
from ..errors import DivergedError, RecipeError
from ..machine.fingerprint import this_machine
from ..machine.hosts import hosts
from ..machine.record import Record, Series
from ..planner.hlo_proto import program_bytes
from ..planner.programs import waiting
from ..recipe.recipe import Recipe
from ..recipe.task import finished
from ..words.facts import Fact
from .profile import capture, explain, make_folder

WARMUP = 50  # steps before the timed ones; their losses are kept
SECONDS = 10.0  # all timed intervals together
INTERVAL_SECONDS = 0.5  # far longer than the wait at its end
INTERVALS = 10  # at least; quartiles of fewer say little
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
    """Measures how fast `recipe` trains, with its own data, order, augmentation and schedules.

    *Arguments:*

    - `steps`: timed steps; by default as many as take about `seconds`.
    - `warmup`: untimed steps, started one by one; their losses are kept. Then `calibration_steps`, for a
      tenth of a second or a few times that, measure the length of a step.
    - `on` and `progress` as in `fit`.
    - `profile`: a folder for a trace of some further, untimed steps.
    - `began`: start of the start-up time, from `time.perf_counter()`; by default this call.
    - `described`: more about the recipe's origin, plain JSON values for the record.

    If the recipe is shorter, training continues with the last values of its schedules.

    *Returns* a record of the kind "train" with these figures, a value for each interval: `steps_per_second`,
    `examples_per_second` (global) and, if data is streamed, `wait_data_share`, the share of the time in which
    the device waited for data. `docs/bench.md` describes `measured`.

    Raises `RecipeError`, `DataError` or `DeviceError` before anything is compiled; `DivergedError` for a loss
    that is not finite, with the step if it is one of the first.
    """
    began = time.perf_counter() if began is None else began
    if warmup < 1 or (steps is not None and steps < 1) or not 0 < seconds < math.inf:
        raise RecipeError("bench-nothing-to-time", steps=steps, seconds=seconds, warmup=warmup)
    if not recipe.clock.total:
        raise RecipeError("recipe-without-steps", recipe=recipe.name, duration=recipe.duration)
    if profile is not None:
        make_folder(profile)
    spent: dict[str, float] = {}
    with contextlib.ExitStack() as closing:
        reporter = Reporter(progress)
        closing.callback(reporter.stop)
        session = closing.enter_context(_session(recipe, on))
        _begin(session, recipe, reporter)
        spent["start"] = time.perf_counter() - began

        began = time.perf_counter()
        if (decided := session.compile(trial=recipe.clock.total >= MANY)) is not None:  # as `fit` does
            reporter.say(decided)
        spent["compile"] = time.perf_counter() - began

        began = time.perf_counter()
        losses = first_losses(session, warmup)
        each = seconds_a_step(session)
        spent["warmup"] = time.perf_counter() - began
        warm = session.step
        counts = intervals(each, steps, seconds)
        _tell(reporter, warmup, warm, counts)
        timed = _timed(session, counts, reporter)
        spent["timed"] = sum(timed.seconds)
        measured = {
            **_described(recipe, session, described),
            **timed.json(),
            "warmup_steps": warm,
            "calibration_steps": warm - warmup,
            "seconds": {name: round(value, 6) for name, value in spent.items()},
            "first_losses": losses,
            **_held(recipe, session, timed),
            "profile": None if profile is None else _profiled(session, profile, spent["timed"] / sum(counts)),
        }
    return Record(
        kind="train",
        name=recipe.name.removesuffix("-synthetic") if measured["data"] == "synthetic" else recipe.name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        measured=measured,
        figures=timed.figures(recipe.batch),
        machine=this_machine(session.placement.devices),
    )


def _session(recipe: Recipe, on: On) -> Session:
    """A session of the recipe without an end. Its windows are as long as those of `fit`, so the programs are
    the same, also in the compilation cache."""
    at_once = 1 if (recipe.clock.total or 0) < MANY else None
    window = feed.window_length(recipe)
    return Session(recipe.endless(), on, steps_per_call=at_once, window=window)


def _begin(session: Session, recipe: Recipe, reporter: Reporter) -> None:
    """Places data and state on the devices, reports it, and waits."""
    reporter.say(session.start)
    for warning in [*session.layout_warnings, *recipe.warnings()]:
        reporter.warn(warning)
    session.begin()
    reporter.say(session.data)
    session.wait()


def _tell(reporter: Reporter, warmup: int, warm: int, counts: list[int]) -> None:
    about = {"warmup": warmup, "calibration": warm - warmup, "timed": sum(counts), "each": counts[0]}
    reporter.say(Fact("bench-begins", about))


@dataclass(frozen=True)
class _Timed:
    """The timed intervals: their steps and seconds, the share of these in which the device waited for data
    (only `streamed` data makes it wait), and the statistics of the feed."""

    counts: list[int]
    seconds: list[float]
    waits: list[float]
    streamed: bool
    feed: dict[str, Any]

    @property
    def speeds(self) -> tuple[float, ...]:
        """Steps/s of each interval."""
        return tuple(n / taken for n, taken in zip(self.counts, self.seconds, strict=True))

    def figures(self, batch: int) -> dict[str, Series]:
        figures = {
            "steps_per_second": Series("steps/s", self.speeds),
            "examples_per_second": Series("examples/s", tuple(speed * batch for speed in self.speeds)),
        }
        return figures | ({"wait_data_share": Series("1", tuple(self.waits))} if self.streamed else {})

    def json(self) -> dict[str, Any]:
        waited = sum(w * t for w, t in zip(self.waits, self.seconds, strict=True))
        return {
            "timed_steps": sum(self.counts),
            "steps_per_interval": self.counts[0],
            "wait_data_share": waited / sum(self.seconds),
            "feed": self.feed,
        }


def _timed(session: Session, counts: list[int], reporter: Reporter) -> _Timed:
    """Times intervals of the given numbers of steps; waits and checks the loss after each."""
    stream, batch, warm = session.watch.stream, session.recipe.batch, session.step
    watch = Watch(session.recipe.task.train, stream)  # resets the waiting time
    reporter.start(0, sum(counts))
    seconds, waits = [], []
    for steps in counts:
        waited, began = watch.waited, time.perf_counter()
        session.advance(steps)
        session.wait()
        seconds.append(time.perf_counter() - began)
        waits.append(min(1.0, (watch.waited - waited) / seconds[-1]))
        row = {"step": session.step - warm, "train/loss": mean_loss(session, session.step - steps + 1)}
        reporter.update({**row, "examples_per_second": steps * batch / seconds[-1]})
    reporter.stop()
    return _Timed(counts, seconds, waits, stream is not None, watch.report(sum(counts), batch, sum(seconds)))


def _described(recipe: Recipe, session: Session, more: Mapping[str, Any] | None) -> dict[str, Any]:
    """The recipe, its data and devices, as plain JSON values."""
    synthetic = isinstance(recipe.task.train, Synthetic)
    return {
        "framework": "chipwise",
        "recipe": recipe.describe(),
        "set": [],
        "data": "synthetic" if synthetic else "real",
        "data_note": "",
        **(more or {}),
        "batch": recipe.batch,
        "replicas": recipe.replicas,
        "precision": recipe.precision,
        "exact": session.layout.exact,
        "devices": describe(session.machine, session.layout),
        "parameters": session.describe()["parameters"],
        "steps_per_call": session.steps_at_once,
        "compilation_cache": bool(getattr(jax.config, "jax_compilation_cache_dir", None)),
    }


def _held(recipe: Recipe, session: Session, timed: _Timed) -> dict[str, Any]:
    """Memory, FLOPs of a step and share of the chip's peak, as plain JSON values."""
    flops = session.programs.flops_per_step_per_device or None
    share = share_of_peak(flops, float(np.median(timed.speeds)), session.machine.kind, recipe.precision)
    return {
        "memory_bytes_per_device": by_category(session.programs, *session.held()),
        "host_peak_bytes": host_peak_bytes(),
        "flops_per_step_per_device": flops,
        "share_of_peak": None if isinstance(share, str) else share,
    }


def _profiled(session: Session, folder: str | Path, seconds_a_step: float) -> dict[str, Any]:
    """A trace of some further steps, explained."""
    at_once = session.steps_at_once
    calls = traced_calls(at_once * seconds_a_step)
    trace = capture(folder, calls, functools.partial(session.advance, at_once), session.wait)
    programs = [program_bytes(executable) for executable in session.programs.executables]
    return explain(trace, programs, calls * at_once)


def intervals(seconds_a_step: float, steps: int | None = None, seconds: float = SECONDS) -> list[int]:
    """The number of steps of each interval: about `INTERVAL_SECONDS` each, and at least `INTERVALS`
    intervals.

    *Arguments:* `steps`: in all; if fewer than `INTERVALS`, each is an interval. None: as many as take about
    `seconds`. Intervals are equally long; the last one also gets the remaining steps.
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
    """The number of traced calls of the step: about half a second, so that the file stays small."""
    return max(3, min(20, round(0.5 / seconds_a_call)))


def first_losses(session: Session, steps: int) -> list[float]:
    """The mean loss of each of the next `steps`, read when all are done."""
    sums = []
    for _ in range(steps):
        session.advance()
        sums.append(session.drain()["loss"])
    return [_finite(s, number, number) for number, s in enumerate(jax.device_get(sums), start=1)]


def mean_loss(session: Session, first: int) -> float:
    """The mean loss of the steps since `first`, the last time it was read. Waits."""
    return _finite(jax.device_get(session.drain()["loss"]), first, session.step)


def seconds_a_step(session: Session) -> float:
    """The length of a step, measured over as many steps as needed."""
    steps, first = 1, session.step + 1
    session.advance(steps)  # untimed: the first call after a wait, and the first of several steps at once
    session.wait()
    while True:
        began = time.perf_counter()
        session.advance(steps)
        session.wait()
        taken = hosts().agree("calibration", time.perf_counter() - began)
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


def by_category(program: Programs, state: TrainState, window: Any, data: Any) -> dict[str, int | None]:
    """Memory of one device in bytes, by category; `state`, `window` and `data` are its arrays.

    *Returns* `parameters` (with their average), `optimizer`, `state`, `data` (examples, and two windows of
    indices and rates), `temporaries` of the program that needs most, with the replicas' sums, `program` code;
    and the device's own figures: `peak_measured` and `available`. `None` is unknown, as on a CPU.
    """
    known = [a for a in (one.memory_analysis() for one in program.executables) if a is not None]
    stats = program.placement.lead.memory_stats() or {}
    temporaries = max((a.temp_size_in_bytes for a in known), default=None)
    if temporaries is not None and not program.functions.fused:
        sums = waiting(program.functions.calls, known[0].output_size_in_bytes // 4)
        temporaries = max(a.temp_size_in_bytes + held for a, held in zip(known, sums, strict=False))
    return {
        "parameters": nbytes((state.params, state.frozen, state.ema)),
        "optimizer": nbytes(state.optimizer),
        "state": nbytes((state.state, state.sums)),
        "data": nbytes(data) + 2 * nbytes(window),
        "temporaries": temporaries,
        "program": sum(a.generated_code_size_in_bytes for a in known) or None,  # 0 on the CPU
        "peak_measured": stats.get("peak_bytes_in_use"),
        "available": stats.get("bytes_limit"),
    }


def host_peak_bytes() -> int | None:
    """The peak host memory of this process in bytes; `None` if the system does not state it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
