"""`fit`: the training loop, from a recipe to a result. Read it from top to bottom."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from ..errors import Stopped
from ..machine.detect import detect
from ..machine.hosts import hosts
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from .agenda import MANY, Agenda
from .best import Best
from .evaluate import Evaluator
from .log import Log
from .meter import Meter
from .on import ALL, On
from .placement import Placement
from .progress import Reporter
from .result import Result
from .run_folder import RunFolder
from .saver import Saver
from .session import Session
from .signals import StopRequest
from .state import axes_of, nbytes


def fit(
    recipe: Recipe,
    run: str | Path | None = None,
    *,
    on: On = ALL,
    eval_every: str | None = "1ep",
    log_every: str | None = None,
    checkpoint_every: str | None = None,
    stop_after: str | None = None,
    keep_best: str | None = None,
    patience: str | None = None,
    fresh: bool = False,
    steps_per_call: int | None = None,
    progress: str = "auto",
    source: dict[str, Any] | None = None,
) -> Result:
    """Trains `recipe` on all devices, and returns the result.

    Only `recipe` changes the result, unless `On(exact=False)` lets the device count change it too.

    *Arguments:*

    - `run`: folder for metrics and checkpoints; a run in it is resumed. With `None`, nothing is written.
    - `on`: which devices, and how they are fed; see `On`.
    - `eval_every`, `log_every`, `checkpoint_every`: durations such as `"1ep"`, `"100st"`, `"5%"`.
      `eval_every=None` evaluates at the end only.
    - `stop_after`: stop and save after this duration, without changing any schedule.
    - `keep_best`: a metric such as `"eval/accuracy"`, whose best checkpoint is kept in the folder `best`;
      `patience`: a duration; the run ends after it without a better value.
    - `fresh`: discard a run in the folder.
    - `steps_per_call`: steps that the host starts at once, with `exact=False`, one device and data in its
      memory; `None` measures in long runs whether 16 are faster.
    - `progress`: `"auto"`, `"bar"`, `"lines"` or `"none"`.
    - `source`: how the command line made the recipe, stored with the run.

    Raises `RecipeError`, `DataError`, `DeviceError`, `RunError` before training begins; `DivergedError`
    for a loss that is not finite; `Stopped` after SIGTERM or Ctrl-C, once the run is saved.
    """
    best = Best.of(recipe, keep_best, patience, run)
    with contextlib.ExitStack() as closing:
        # ---- devices, hosts and schedule: checked before anything is read, written or compiled
        closing.enter_context(hosts().failing())
        first = hosts().first  # only this host writes and reports
        reporter, meter = Reporter(progress if first else "silent"), Meter(recipe.batch)
        closing.callback(reporter.stop)
        agenda = Agenda.of(recipe.clock, eval_every, log_every, checkpoint_every, stop_after)
        session = closing.enter_context(Session(recipe, on, steps_per_call=steps_per_call))
        _introduce(session, reporter)

        # ---- data: read and checked before the run folder is touched
        session.read()
        if recipe.task.eval is not None:
            session.open_evaluation()

        # ---- the run folder, and the state: resumed or new
        folder = _open(run, session, source, fresh) if run is not None and first else None
        closing.callback(folder.close if folder is not None else lambda: None)
        where = session.placement.agree("run", None if folder is None else str(folder.path))
        stop = StopRequest()
        closing.callback(stop.close)
        saver = Saver(folder, where, meter, agenda)
        closing.callback(saver.close)
        session.begin(saver.restore(session, reporter), last=agenda.last)
        begin = session.step
        log = Log(recipe, meter, reporter, folder, saver, begin)
        if best is not None:
            best.go_on(log.history, saver.rewind_best(begin), begin, session.placement.agree)
        if folder is not None and begin < agenda.last:
            closing.enter_context(folder.process(session))

        # ---- train
        reporter.start(begin, agenda.total)
        if begin < agenda.last:
            reporter.say(session.data)
            _compile(session, meter, reporter, trial=agenda.last - begin >= MANY)
            _train(session, agenda, log, saver, stop, best)
        saver.save_last(session, log)
        if stop:
            raise _stopped(stop, session, where)
        return _result(session, log, saver, begin, folder, where, best)


def _introduce(session: Session, reporter: Reporter) -> None:
    reporter.say(session.start)
    for warning in session.warnings:
        reporter.warn(warning)


def _open(run: str | Path, session: Session, source: dict[str, Any] | None, fresh: bool) -> RunFolder:
    described = {**session.recipe.describe(), "source": source}
    return RunFolder(run, described, needed_bytes=4 * nbytes(session.abstract), fresh=fresh)


def _compile(session: Session, meter: Meter, reporter: Reporter, trial: bool) -> None:
    meter.seconds["start"] = meter.total()
    with meter.section("compile"):
        decided = session.compile(trial=trial)
    if decided is not None:
        reporter.say(decided)


def _train(
    session: Session, agenda: Agenda, log: Log, saver: Saver, stop: StopRequest, best: Best | None
) -> None:
    """Steps until `agenda.last`, a stop or the end of patience. The host only starts steps, and reads metrics
    one step after a log step."""
    session.wait()
    log.meter.mark(session.step, first=True)
    saver.begin()
    while session.step < agenda.last and not stop.reached() and not (best and best.over):
        steps = min(session.steps_at_once, agenda.until_next(session.step))
        if not session.advance(steps, stopped=lambda: stop.alone):
            break
        log.collect(session.watch)
        if session.step in agenda.log:
            log.take(session.step, session.drain())
        if session.step in agenda.evaluate:
            log.collect(session.watch)
            log.evaluate(session)
            _keep(session, log, saver, best)
        if saver.due(session):
            log.collect(session.watch)
            saver.save(session, log)
    log.collect(session.watch)
    log.meter.seconds["wait_data"] = session.watch.waited


def _keep(session: Session, log: Log, saver: Saver, best: Best | None) -> None:
    """Keeps the state that was just evaluated, if it is the best."""
    if best is None:
        return
    if session.placement.agree("best", best.improved(session.step, log.final)):
        saver.save_best(session, log)
    best.over = session.placement.agree("patience", best.waited_enough(session.step))


def evaluate(
    recipe: Recipe, params: Tree, state: Tree, *, batch: int | None = None, on: On = ALL
) -> dict[str, Any]:
    """Metric name to value over the task's `eval` source, every example exactly once.

    *Arguments:* `batch`, global, by default chosen by the memory that it needs; `on`, of which only the
    devices matter (any number works).
    """
    placement = Placement.of(detect(on.devices, on.platform), recipe.shards)
    with placement.hosts.failing(), contextlib.closing(Evaluator(recipe, placement, batch)) as evaluator:
        if placement.shards == 1:
            return evaluator(*placement.spread((params, state)))
        placed = placement.put_cut(params, axes_of(recipe, params)), placement.put(state)
        return evaluator(*map(placement.gather, placed))


def _result(
    session: Session,
    log: Log,
    saver: Saver,
    begin: int,
    folder: RunFolder | None,
    run: str | None,
    best: Best | None,
) -> Result:
    """Evaluates at the end, and writes the result unless it is already in the folder."""
    if best is None:
        session.forget_optimizer()  # the evaluation can use its memory
    log.evaluate(session)
    _keep(session, log, saver, best)
    log.reporter.stop()
    early = best is not None and best.over and session.step < session.total
    best_found = None if best is None else {**best.to_json(), "ended_early": early}
    result = Result.of(session, log, log.meter, begin, run, best_found)
    complete = session.step == session.total or early
    if folder is not None and complete and (begin < session.step or folder.result() is None):
        folder.finish(result.to_json())
    return result


def _stopped(stop: StopRequest, session: Session, run: str | None) -> Stopped:
    facts = {"signal": stop.name, "step": session.step, "total": session.total}
    if run is None:
        return Stopped("stopped-unsaved", **facts)
    return Stopped("stopped", **facts, run=run)
