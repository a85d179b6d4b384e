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
    """Measures the training of `recipe` unchanged, with its own data, order, augmentation and schedules.

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
    """Of the recipe without an end. Its windows are as long as those of `fit`, so that the program is the
    same, for compilation caches too."""
    at_once = 1 if (recipe.clock.total or 0) < MANY else None
    window = feed.window_length(recipe)
    return Session(recipe.endless(), on, steps_per_call=at_once, window=window)


def _begin(session: Session, recipe: Recipe, reporter: Reporter) -> None:
    """Places data and state, and says where. Waits."""
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
    """What the clock saw: the steps of each interval and the seconds that they took, the share of these that
    the device waited for data (`streamed` data alone can make it wait), and the feed's account."""

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
    """The intervals of so many steps, with a wait and a look at the loss after each."""
    stream, batch, warm = session.watch.stream, session.recipe.batch, session.step
    watch = Watch(session.recipe.task.train, stream)  # what was waited for before the clock is not its part
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
    """What was measured and where, as plain JSON values."""
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
    """Memory, and the arithmetic of a step beside the chip's peak, as plain JSON values."""
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


def first_losses(session: Session, steps: int) -> list[float]:
    """The mean loss of each of the next `steps`, read when all are done."""
    sums = []
    for _ in range(steps):
        session.advance()
        sums.append(session.drain()["loss"])
    return [_finite(s, number, number) for number, s in enumerate(jax.device_get(sums), start=1)]


def mean_loss(session: Session, first: int) -> float:
    """The mean loss since step `first`, since which it was not asked for. Waits."""
    return _finite(jax.device_get(session.drain()["loss"]), first, session.step)


def seconds_a_step(session: Session) -> float:
    """Measured over as many steps as take a while, and few more."""
    steps, first = 1, session.step + 1
    session.advance(steps)  # not timed: the first call after a wait, and that of several steps at once
    session.wait()
    while True:
        began = time.perf_counter()
        session.advance(steps)
        session.wait()
        taken = hosts().agree("calibration", time.perf_counter() - began)
        if taken >= _CALIBRATION_SECONDS:
            mean_loss(session, first)
            return taken / steps
        # The first stretches are too short to tell by how much
        steps = min(4 * steps, math.ceil(1.2 * steps * _CALIBRATION_SECONDS / taken))


def _finite(loss: Any, first: int, last: int) -> float:
    value = float(finished({"loss": loss})["loss"])
    if not math.isfinite(value):
        raise DivergedError(
            "bench-loss-not-finite", value=str(value), first=first, last=last, steps=(first, last)
        )
    return value


def by_category(program: Programs, state: TrainState, window: Any, data: Any) -> dict[str, int | None]:
    """Bytes of one device, all of a kind: `state`, `window` and `data` are what it holds.

    *Returns* `parameters` (with their average), `optimizer`, `state`, `data` (examples, and the windows of
    indices and rates, of which there are two), `temporaries` of the hungriest program with the replicas'
    sums, `program` code; and what the device itself says: the most that was ever `peak_measured` in use, and
    `available` in all. `None` is unknown: a CPU keeps no such account.
    """
    known = [a for a in (one.memory_analysis() for one in program.executables) if a is not None]
    stats = program.placement.lead.memory_stats() or {}
    temporaries = max((a.temp_size_in_bytes for a in known), default=None)
    if temporaries is not None and not program.of.fused:
        sums = waiting(program.of.calls, known[0].output_size_in_bytes // 4)
        temporaries = max(a.temp_size_in_bytes + held for a, held in zip(known, sums, strict=False))
    return {
        "parameters": nbytes((state.params, state.frozen, state.ema)),
        "optimizer": nbytes(state.optimizer),
        "state": nbytes((state.state, state.sums)),
        "data": nbytes(data) + 2 * nbytes(window),
        "temporaries": temporaries,
        "program": sum(a.generated_code_size_in_bytes for a in known) or None,  # the CPU says 0
        "peak_measured": stats.get("peak_bytes_in_use"),
        "available": stats.get("bytes_limit"),
    }


def host_peak_bytes() -> int | None:
    """The most memory that this process ever held on the host; `None` where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
