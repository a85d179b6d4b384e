"""How fast a recipe trains on this machine, what that speed was made of, and the record of it.

The first steps are those of a fresh run: their losses are kept, so that two records can be checked to be of
the same training before their speeds are compared. Then come timed intervals; only between them does the host
wait for the device. What is not training, such as evaluation or checkpoints, does not take place.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from ..data.synthetic import Synthetic
from ..data.watch import Watch
from ..data.workers import chosen as readers
from ..engine import loader
from ..engine.dispatch import MANY
from ..engine.finish import finished
from ..engine.meter import share_of_peak
from ..engine.on import ALL, On
from ..engine.placement import describe, lay_out, start_line
from ..engine.program import QUEUED_STEPS, Program
from ..engine.progress import Reporter
from ..engine.state import count
from ..engine.step import first_state
from ..errors import DivergedError, RecipeError
from ..machine.detect import detect
from ..machine.fingerprint import this_machine
from ..planner.hlo_proto import program_bytes
from ..recipe.recipe import Recipe
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
    machine = detect(on.devices, on.platform)
    layout, said = lay_out(
        machine, recipe.batch, recipe.replicas, asked=on.devices is not None, exact=on.exact
    )
    reporter.say(start_line(machine, layout, recipe.precision))
    for text in [*said, *map(str, recipe.warnings())]:
        reporter.warn(text)
    readers(task.train, on.workers)
    resident = loader.resident(task.train, machine.devices[0], on.feed)
    columns = loader.read(task.train, task.classes, "training") if resident else None
    longer = recipe.endless()
    program = Program(longer, layout, machine.devices[: layout.devices], resident=resident)
    spent: dict[str, float] = {}
    with contextlib.ExitStack() as closing:
        closing.callback(reporter.stop)
        with jax.default_device(machine.devices[0]):
            carry = program.put_all(first_state(longer))
        if columns is not None:
            data: Any = loader.Resident(program.put_all(loader.flat(columns)))
            columns = None  # the host's copy may go
        else:
            data = loader.Streamed(longer, program.put_cut, 0, on.workers)
        closing.callback(data.close)
        reporter.say(data.said(task.train))
        # As long as those of `fit`, so that the program is the same, for compilation caches too
        windows = loader.Windows(longer, program.put_window, 0, loader.window_length(recipe))
        closing.callback(windows.close)
        window = windows.at(0)
        jax.block_until_ready((carry, window))
        spent["start"] = time.perf_counter() - began

        began = time.perf_counter()
        wanted = 1 if recipe.clock.total < MANY else None  # as `fit` does
        how = program.compile(carry, window, data.placed if resident else program.data_shapes(), wanted)
        if how:
            reporter.say(how)
        spent["compile"] = time.perf_counter() - began

        run = _Run(program, carry, data, windows)
        began = time.perf_counter()
        losses = run.first_losses(warmup)
        each = run.seconds_a_step()
        spent["warmup"] = time.perf_counter() - began
        warm = run.step

        counts = intervals(each, steps, seconds)
        reporter.say(
            f"{counted(warmup, 'step')} of warm-up and {warm - warmup} of calibration done; "
            f"{counted(sum(counts), 'timed step')} follow{'s' * (sum(counts) == 1)}, {counts[0]} at a time"
        )
        watch = Watch(task.train, None if data.stream is None else _Since(data.stream))  # type: ignore[arg-type]
        reporter.start(0, sum(counts))
        timed, waits = [], []
        for steps_now in counts:
            waited, now = watch.waited, time.perf_counter()
            run.advance(steps_now)
            run.wait()
            timed.append(time.perf_counter() - now)
            waits.append(min(1.0, (watch.waited - waited) / timed[-1]))
            loss = run.loss(f"between steps {run.step - steps_now + 1} and {run.step}")
            done = {"step": run.step - warm, "train/loss": loss}
            reporter.update(done | {"examples_per_second": steps_now * recipe.batch / timed[-1]})
        reporter.stop()
        spent["timed"] = sum(timed)
        fed = watch.report(sum(counts), recipe.batch, spent["timed"])
        memory = by_category(program, run.carry[0], windows.at(run.step - 1)[0], _held(data, layout.devices))
        peak = host_peak_bytes()

        profiled = None
        if profile is not None:
            at_once = program.steps_at_once
            shown = traced_calls(at_once * spent["timed"] / sum(counts))
            trace = capture(profile, shown, lambda: run.advance(at_once), run.wait)
            profiled = explain(trace, [program_bytes(made) for made in program.executables], shown * at_once)

    speeds = [n / taken for n, taken in zip(counts, timed, strict=True)]
    flops = program.flops_per_step_per_device or None
    share = share_of_peak(flops, float(np.median(speeds)), machine.kind, recipe.precision)
    synthetic = isinstance(task.train, Synthetic)
    figures = {
        "steps_per_second": Series("steps/s", tuple(speeds)),
        "examples_per_second": Series("examples/s", tuple(speed * recipe.batch for speed in speeds)),
    }
    if data.stream is not None:
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
            "parameters": count(run.carry[0].params),
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
        machine=this_machine(machine.devices[: layout.devices]),
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


class _Run:
    """A training under way: the state on the devices, the step that it has reached, and who brings data."""

    def __init__(self, program: Program, carry: list, data: Any, windows: loader.Windows):
        self.program, self.carry, self.step = program, carry, 0
        self._data, self._windows = data, windows
        self._queued: deque[Any] = deque()

    def advance(self, steps: int) -> None:
        """Begins so many steps, as `fit` does. Waits only when some tens are queued."""
        program, queued, last = self.program, self._queued, self.step + steps
        ahead = min(QUEUED_STEPS // program.steps_at_once, self._data.in_use - 1)
        while self.step < last:
            batch = self._data.at(self.step, lambda: not queued or queued[-1].is_ready())
            n = min(program.steps_at_once, last - self.step, self._windows.left(self.step))
            self.carry, token = program.step(self.carry, self._windows.at(self.step), batch, n)
            self.step += n
            queued.append(token)
            if len(queued) > ahead:
                queued.popleft().block_until_ready()

    def wait(self) -> None:
        """Until every step begun is done."""
        jax.block_until_ready(self.carry)
        self._queued.clear()

    def first_losses(self, steps: int) -> list[float]:
        """The mean loss of each of the next `steps`, read when all are done."""
        sums = []
        for _ in range(steps):
            self.advance(1)
            taken, self.carry = self.program.drain(self.carry)
            sums.append(taken["loss"])
        return [_finite(s, f"in step {number}") for number, s in enumerate(jax.device_get(sums), start=1)]

    def loss(self, when: str) -> float:
        """The mean loss since the last call. Waits."""
        taken, self.carry = self.program.drain(self.carry)
        return _finite(jax.device_get(taken["loss"]), when)

    def seconds_a_step(self) -> float:
        """Measured over as many steps as take a while, and few more."""
        steps = 1
        self.advance(steps)  # not timed: the first call after a wait, and that of several steps at once
        self.wait()
        while True:
            began = time.perf_counter()
            self.advance(steps)
            self.wait()
            taken = time.perf_counter() - began
            if taken >= _CALIBRATION_SECONDS:
                self.loss(f"up to step {self.step}")
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


def _held(data: Any, devices: int) -> Any:
    """What a device holds of the training data, as arrays or shapes."""
    if data.stream is None:
        return data.placed[0]
    each = math.ceil(data.stream.batch_bytes / devices)
    return jax.ShapeDtypeStruct((data.stream.batches * each,), np.uint8)


def _finite(loss: Any, when: str) -> float:
    value = finished({"loss": loss})["loss"]
    if not np.isfinite(value):
        raise DivergedError(
            f"The training loss became {value} {when}: no record is written. Try a lower rate "
            f"(--set lr=...), gradient clipping (--set clip=1.0) or precision f32."
        )
    return float(value)
