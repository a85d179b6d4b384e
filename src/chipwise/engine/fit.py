"""`fit`: the training loop, from a recipe to a result. Read it from top to bottom."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ..machine.arithmetic import fixed
from ..recipe.recipe import Recipe
from .agenda import Agenda
from .best import Best
from .ledger import Ledger
from .log import Log
from .meter import Meter
from .on import ALL, On
from .progress import Reporter
from .result import Result
from .run_folder import RunFolder
from .saver import Saver
from .session import Session
from .signals import StopRequest
from .stuck import watched


@fixed()
def fit(
    recipe: Recipe,
    run: str | Path | None = None,
    *,
    on: On = ALL,
    eval_every: str | None = "1ep",
    log_every: str | None = None,
    checkpoint_every: str | None = None,
    stop_after: str | None = None,
    keep: int | str | None = None,
    ledger: str | None = None,
    keep_best: str | None = None,
    patience: str | None = None,
    fresh: bool = False,
    changed_code: bool = False,
    progress: str = "auto",
) -> Result:
    """Trains `recipe` on all devices. Only `recipe` changes the result, unless with `On(exact=False)`.

    *Arguments:*

    - `run`: a folder for metrics and checkpoints, or `None`; a run in it goes on, or is discarded if `fresh`;
      with `changed_code` it goes on although its programs differ, by code, a version or a setting.
    - `on`: which devices, and how they are fed; see `On`. `progress`: `"auto"`, `"bar"`, `"lines"`, `"none"`.
    - `eval_every` (`None`: only at the end), `log_every`, `checkpoint_every`: durations, `"1ep"` or `"5%"`;
      `ledger`: of rows of digests, by default at all of these; `stop_after`: stop then, and save.
    - `keep`: so many of the newest checkpoints, or `"5ep"`: also one every five epochs; `keep_best`: a
      metric, `"eval/accuracy"`, whose best is kept in `best`; `patience`: the run ends after so long without
      a better.

    Raises `RecipeError`, `DataError`, `DeviceError`, `RunError` before training begins; `DivergedError` (loss
    not finite), `DeviceFault` (bits differ); `Stopped` after SIGTERM or Ctrl-C, once the run is saved.
    """
    with contextlib.ExitStack() as closing:
        # ---- hosts, schedule, devices and data: checked before anything is written or compiled
        here = closing.enter_context(watched(on.stuck, run))
        best, meter = Best.of(recipe, keep_best, patience, run), Meter(recipe.batch)
        reporter = Reporter(progress if here.first else "silent")
        closing.callback(reporter.stop)
        agenda = Agenda.of(recipe.clock, eval_every, log_every, checkpoint_every, stop_after, keep, ledger)
        session = closing.enter_context(Session(recipe, on))
        reporter.introduce(session.start, session.warnings)
        session.read(evaluation=True)

        # ---- the run folder, and the state: resumed or new
        folder = closing.enter_context(RunFolder.opened(run, session, fresh))
        stop = closing.enter_context(contextlib.closing(StopRequest()))
        saver = closing.enter_context(contextlib.closing(Saver(session, folder, meter, agenda, best)))
        session.begin(saver.restore(reporter), last=agenda.last)
        log = Log(session, meter, reporter, folder, Ledger(session, folder, saver, agenda, changed_code))
        saver.rewind_best(log.history)

        # ---- train
        if log.begin < agenda.last:
            if folder is not None:
                closing.enter_context(folder.process(session, changed_code, best.rule))
            reporter.say(session.data)
            meter.seconds["start"] = meter.total()
            with meter.section("compile"), reporter.waiting("compiling"):
                session.compile()
        closing.enter_context(log.divergence(saver.newest))
        log.undoing(lambda: _train(session, agenda, log, saver, stop), agenda.last)

        # ---- the last checkpoint, evaluation and result
        saver.save_last()
        if stop:
            raise stop.error(session.step, session.total, saver.run)
        if not best.metric:
            session.forget_optimizer()  # the evaluation can use its memory
        log.evaluate(kept=session.step in agenda.evaluate)
        if session.step in agenda.evaluate:
            saver.keep_best(log.final)
        result = Result.of(log, saver)
        if folder is not None and result.complete:
            folder.finish(result.to_json(), trained=session.step > log.begin)
        return result


def _train(session: Session, agenda: Agenda, log: Log, saver: Saver, stop: StopRequest) -> None:
    """Steps until `agenda.last`, a stop or the end of patience. The host reads metrics one step late."""
    saver.begin()
    log.meter.mark(session.step, first=True)
    while session.step < agenda.last and not stop.reached() and not saver.best.over:
        if not session.advance(stopped=lambda: stop.alone):
            break
        log.collect()
        log.take(agenda)
        if session.step in agenda.evaluate and session.step < agenda.last:
            log.evaluate()
            saver.keep_best(log.final)
        if saver.due():
            log.collect(last=True)
            saver.save()
    log.collect(last=True, rest=not stop)
