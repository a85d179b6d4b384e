"""`fit`: the training loop, from a recipe to a result. Read it from top to bottom."""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..data.watch import Watch
from ..data.workers import chosen as readers
from ..errors import Stopped
from ..machine.detect import detect
from ..machine.fingerprint import this_machine
from ..recipe.duration import Clock
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from . import loader
from .checkpoint import Checkpoints
from .dispatch import MANY
from .evaluate import Evaluator
from .log import Log
from .meter import Meter, share_of_peak
from .on import ALL, On
from .placement import describe, lay_out, start_line
from .program import QUEUED_STEPS, Program, check_steps_per_call
from .progress import Reporter
from .reduce import AXIS
from .restore import abstract_state
from .result import Result, rounded
from .run_folder import RunFolder
from .signals import StopRequest
from .state import count, fingerprint
from .step import first_state
from .stored import number

_SECONDS_BETWEEN_SAVES = 30.0  # unless an interval was asked for


def fit(
    recipe: Recipe,
    run: str | Path | None = None,
    *,
    on: On = ALL,
    eval_every: str | None = "1ep",
    log_every: str | None = None,
    checkpoint_every: str | None = None,
    stop_after: str | None = None,
    fresh: bool = False,
    steps_per_call: int | None = None,
    progress: str = "auto",
    source: dict[str, Any] | None = None,
) -> Result:
    """Trains `recipe` on every device found, and says what came of it.

    Nothing but `recipe` changes the result; `exact=False` alone lets it differ from one device
    count to another.

    *Arguments:*

    - `run`: folder for metrics and checkpoints; a run found there is resumed. `None` keeps nothing.
    - `on`: which devices, and how they are fed; see `On`.
    - `eval_every`, `log_every`, `checkpoint_every`: durations such as `"1ep"`, `"100st"`, `"5%"`.
      `eval_every=None` evaluates at the end only.
    - `stop_after`: stop there, saved, without changing any schedule.
    - `fresh`: discard a run found in the folder.
    - `steps_per_call`: steps that the host starts at once, with `exact=False`, one device and data in its
      memory; `None` tries in long runs whether 16 are faster.
    - `progress`: `"auto"`, `"bar"`, `"lines"` or `"none"`.
    - `source`: how the command line made the recipe, stored with the run.

    Raises `RecipeError`, `DataError`, `DeviceError`, `RunError` before training begins; `DivergedError`
    for a loss that is not finite; `Stopped` after SIGTERM or Ctrl-C, when the run is saved.
    """
    # ---- agreements, before anything is read, written or compiled
    reporter, meter = Reporter(progress), Meter(recipe.batch)
    clock = recipe.clock
    agenda = Agenda.of(clock, eval_every, log_every, checkpoint_every, stop_after)
    machine = detect(on.devices, on.platform)
    layout, warnings = lay_out(
        machine, recipe.batch, recipe.replicas, asked=on.devices is not None, exact=on.exact
    )
    abstract = abstract_state(recipe)
    reporter.say(start_line(machine, layout, recipe.precision))
    for text in [*warnings, *map(str, recipe.warnings())]:
        reporter.warn(text)

    task = recipe.task
    readers(task.train, on.workers)

    # ---- data: read and checked while nothing is lost by leaving
    resident = loader.resident(task.train, machine.devices[0], on.feed)
    if steps_per_call is not None and steps_per_call != 1:
        check_steps_per_call(steps_per_call, layout, resident)
    columns = loader.read(task.train, task.classes, "training") if resident else None
    program = Program(recipe, layout, machine.devices[: layout.devices], resident=resident)
    evaluator = Evaluator(recipe, program.mesh, workers=on.workers) if task.eval is not None else None

    with contextlib.ExitStack() as closing:
        closing.callback(reporter.stop)
        if evaluator is not None:
            closing.callback(evaluator.close)
        # ---- the run folder, and the state: resumed or new
        folder = saved = restored = None
        if run is not None:
            state_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(abstract))
            folder = RunFolder(run, {**recipe.describe(), "source": source}, 4 * state_bytes, fresh)
            closing.callback(folder.close)
        stop = StopRequest()
        closing.callback(stop.close)
        if folder is not None:
            saved = Checkpoints(folder.checkpoints)
            closing.callback(saved.close)
            restored = saved.restore(abstract, reporter.warn)
        if restored is not None:
            first: Tree = restored[0]
            begin = int(first.step)
            reporter.say(f"resumed at step {begin} of {clock.total} from {run}")
        else:
            with jax.default_device(machine.devices[0]):
                first = first_state(recipe)
            begin = 0
        history = folder.rewind(begin) if folder is not None else []
        before = number(restored[1].get("seconds")) if restored is not None else None
        log = Log(recipe, meter, reporter, folder, saved, begin, history, before or 0.0)
        training = _Training(program, log, meter, evaluator, saved, begin, restored is not None)
        training.carry = program.put_all(first)

        # ---- train
        fed: dict[str, Any] = {}
        reporter.start(begin, agenda.total)
        if begin < agenda.last:
            if columns is not None:
                data: Any = loader.Resident(program.put_all(loader.flat(columns)))
                columns = None  # the host's copy may go
            else:
                data = loader.Streamed(recipe, program.put_cut, begin, on.workers)
            closing.callback(data.close)
            watch = Watch(task.train, data.stream)
            reporter.say(data.said(task.train))
            windows = loader.Windows(recipe, program.put_window, begin)
            closing.callback(windows.close)
            meter.seconds["start"] = meter.total()
            with meter.section("compile"):
                at_once = 1 if steps_per_call is None and agenda.last - begin < MANY else steps_per_call
                shapes = data.placed if resident else program.data_shapes()
                how = program.compile(training.carry, windows.at(begin), shapes, at_once)
            if how:
                reporter.say(how)
            training.run(agenda, data, watch, windows, stop)
            meter.seconds["wait_data"] = watch.waited
            fed = watch.report(training.step - begin, recipe.batch, meter.seconds["train"])
        training.save_last()
        if stop:
            raise _stopped(stop.name, training.step, agenda.total, folder)

        # ---- the end: optimizer state is no longer needed, the evaluation may have its memory
        training.carry = program.without_optimizer(training.carry)
        training.evaluate()
        reporter.stop()
        host = jax.device_get(program.whole(training.carry))
        speed = meter.summary()
        speed["share_of_peak"] = share_of_peak(
            program.flops_per_step_per_device, speed["steps_per_second"], machine.kind, recipe.precision
        )
        described = {
            **describe(machine, layout),
            "precision": recipe.precision,
            "parameters": count(host.params),
        }
        result = Result(
            recipe=recipe.name,
            steps=training.step,
            metrics=log.final,
            fingerprint=fingerprint(host.params),
            devices=described,
            machine=this_machine(machine.devices[: layout.devices]).to_json(),
            examples_per_second=speed["examples_per_second"],
            speed=speed,
            seconds=rounded({**meter.seconds, "total": meter.total()}),
            feed=fed,
            run=str(folder.path) if folder is not None else None,
            params=host.ema if recipe.ema is not None else host.params,
            state=host.state,
            history=log.history,
        )
        done = training.step == agenda.total
        if folder is not None and done and (begin < agenda.total or folder.result() is None):
            folder.finish(result.to_json())
        return result


@dataclass(frozen=True)
class Agenda:
    """The steps after which something is due; `last` is where this process stops, `total` the run's end.

    Whether a checkpoint is due also depends on the seconds since the last one, unless an interval was
    asked for (`save_always`).
    """

    total: int
    last: int
    log: frozenset[int]
    evaluate: frozenset[int]
    save: frozenset[int]
    save_always: bool

    @functools.cached_property
    def _marks(self) -> list[int]:
        return sorted(self.log | self.evaluate | self.save | {self.last})

    def until_next(self, step: int) -> int:
        """Steps from `step` to the next after which something is due."""
        return self._marks[bisect.bisect_right(self._marks, step)] - step

    @classmethod
    def of(
        cls,
        clock: Clock,
        eval_every: str | None,
        log_every: str | None,
        checkpoint_every: str | None,
        stop_after: str | None,
    ) -> Agenda:
        """From durations; without one, some 25 log rows and 20 possible checkpoints a run."""
        total = clock.total or 0
        last = min(total, clock.steps(stop_after)) if stop_after else total

        def marks(every: str | None) -> frozenset[int]:
            return frozenset(clock.marks(every)) if every and total else frozenset()

        return cls(
            total=total,
            last=last,
            log=marks(log_every or f"{max(1, min(200, total // 25))}st") | {last},
            evaluate=marks(eval_every) - {last},
            save=marks(checkpoint_every or f"{max(1, total // 20)}st") - {last},
            save_always=checkpoint_every is not None,
        )


class _Training:
    """A run in progress: the state on the devices, the step it has reached, and what may be done to it."""

    carry: Any

    def __init__(
        self,
        program: Program,
        log: Log,
        meter: Meter,
        evaluator: Evaluator | None,
        saved: Checkpoints | None,
        begin: int,
        resumed: bool,
    ):
        self.program, self.recipe, self.log, self.meter = program, program.recipe, log, meter
        self.evaluator, self.saved = evaluator, saved
        self.step = begin
        self._saved_at = begin if resumed else -1

    def run(
        self, agenda: Agenda, feed: Any, watch: Watch, windows: loader.Windows, stop: StopRequest
    ) -> None:
        """Steps until `agenda.last` or a stop. The host only starts steps; it waits one after a log step."""
        queued: deque = deque()
        jax.block_until_ready(self.carry)
        self.meter.mark(self.step, first=True)
        last_save = self.meter.total()
        while self.step < agenda.last and not stop:
            data = feed.at(self.step, lambda: not queued or queued[-1].is_ready(), lambda: bool(stop))
            if data is None:
                break
            steps = min(self.program.steps_at_once, agenda.until_next(self.step), windows.left(self.step))
            self.carry, token = self.program.step(self.carry, windows.at(self.step), data, steps)
            self.step += steps
            queued.append(token)
            if len(queued) > min(QUEUED_STEPS // self.program.steps_at_once, feed.in_use - 1):
                queued.popleft().block_until_ready()
            self.log.collect(watch)
            if self.step in agenda.log:
                sums, self.carry = self.program.drain(self.carry)
                self.log.take(self.step, sums)
            if self.step in agenda.evaluate:
                self.log.collect(watch)
                self.evaluate()
            due = agenda.save_always or self.meter.total() - last_save >= _SECONDS_BETWEEN_SAVES
            if self.saved is not None and self.step in agenda.save and due:
                self.log.collect(watch)
                self.save()
                last_save = self.meter.total()
        self.log.collect(watch)

    def evaluate(self) -> None:
        """Evaluates the state as it is, the averaged parameters if there are any."""
        if self.evaluator is None:
            return
        with self.meter.section("evaluate"):
            state = self.program.whole(self.carry)
            params = state.ema if self.recipe.ema is not None else state.params
            metrics = self.evaluator(params, state.state)
        self.log.evaluated(self.step, metrics)

    def save(self) -> None:
        """Begins a checkpoint of the state as it is. Raises `DivergedError` rather than keep NaNs."""
        assert self.saved is not None
        with self.meter.section("checkpoint"):
            host = jax.tree.map(np.array, jax.device_get(self.program.whole(self.carry)))
            if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(host.params)):
                raise self.log.diverged("A parameter became NaN or infinite", self.step)
            about = {"step": self.step, "recipe": self.recipe.describe(), "seconds": self.log.seconds}
            self.saved.save(self.step, host, about)
            self._saved_at = self.step

    def save_last(self) -> None:
        """Saves the state unless it is saved, and waits until everything is on disk."""
        jax.block_until_ready(self.carry)
        if self.saved is not None:
            if self._saved_at != self.step:
                self.save()
            with self.meter.section("checkpoint"):
                self.saved.wait()


def evaluate(
    recipe: Recipe,
    params: Tree,
    state: Tree,
    *,
    batch: int | None = None,
    on: On = ALL,
) -> dict[str, Any]:
    """Metric name to value over the task's `eval` source, every example exactly once.

    *Arguments:* `batch` is global and chosen from the memory needed when left out; of `on` only
    the devices count (any number will do).
    """
    machine = detect(on.devices, on.platform)
    mesh = Mesh(np.asarray(machine.devices), (AXIS,))
    evaluator = Evaluator(recipe, mesh, batch)
    placed = jax.device_put((params, state), jax.NamedSharding(mesh, jax.P()))
    try:
        return evaluator(*placed)
    finally:
        evaluator.close()


def _stopped(name: str | None, step: int, total: int, folder: RunFolder | None) -> Stopped:
    where = (
        f"saved; resume with --run {folder.path} and the same settings."
        if folder is not None
        else "nothing is saved: name a folder with --run to be able to resume."
    )
    return Stopped(f"Stopped by {name} at step {step} of {total}; {where}")
