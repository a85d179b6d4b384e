"""`moments`: the training loop, from a recipe to a result. Read it from top to bottom."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path

from ..machine.arithmetic import fixed
from ..recipe.recipe import Recipe
from .agenda import Agenda
from .best import Best
from .ledger import Ledger
from .log import Log
from .meter import Meter
from .moment import Moment
from .on import ALL, On
from .progress import Reporter
from .result import Result
from .run_folder import RunFolder
from .saver import Saver
from .session import Session
from .signals import StopRequest
from .stuck import watched
from .tracking import Tracking
from .verify import ReplicaDiffers


def moments(
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
    track: str | Sequence[str] = (),
    progress: str = "auto",
) -> Generator[Moment, None, Result]:
    """The training of `fit`, as a loop in which your code runs at its moments:

        for moment in cw.moments(recipe, run="runs/mine"):
            if moment.kind == "evaluation" and moment.metrics["eval/accuracy"] > 0.95:
                moment.stop()
        print(moment.result.fingerprint)

    *Yields* a `Moment` after each row of metrics, each evaluation and each checkpoint, and one at the end,
    with the `result`. What the code does there changes no bit. The device works on the next step meanwhile;
    where it is done before the code, that time is `seconds["own_code"]`, and no part of any speed. A loop
    that is left, by `break` or an exception, saves its state; the same call continues the run.

    *Arguments*, and what it raises: as `fit`. Within the loop, JAX's settings are those of `fit`.
    """
    with fixed(), Tracking(track, run) as tracking, contextlib.ExitStack() as closing:
        # ---- hosts, schedule, devices and data: checked before anything is written or compiled
        here = closing.enter_context(watched(on.stuck, run))
        best, meter = Best.of(recipe, keep_best, patience, run), Meter(recipe.batch)
        reporter = Reporter(progress if here.first else "silent")
        closing.callback(reporter.stop)
        agenda = Agenda.of(recipe.clock, eval_every, log_every, checkpoint_every, stop_after, keep, ledger)
        session = closing.enter_context(Session(recipe, on))
        reporter.introduce(session.start, session.warnings)
        best.check(session.read(evaluation=True))

        # ---- the run folder, and the state: resumed or new
        folder = closing.enter_context(RunFolder.opened(run, session, fresh))
        tracking.begin(folder.path if folder else None, reporter)
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
        yield from log.undoing(lambda: _train(session, agenda, log, saver, stop), agenda.last)

        # ---- the last checkpoint, evaluation and result
        saver.save_last()
        if stop:
            raise stop.error(session.step, session.total, saver.run)
        if not best.metric:
            session.forget_optimizer()  # the evaluation can use its memory
        log.evaluate(kept=session.step in agenda.evaluate)
        if session.step in agenda.evaluate:
            saver.keep_best(log.final)
        if session.step > log.begin:
            yield from _told(log, saver)
        result = Result.of(log, saver)
        if folder is not None and result.complete:
            folder.finish(result.to_json(), trained=session.step > log.begin)
        with contextlib.suppress(GeneratorExit):  # to leave the loop at its end is no stop
            yield Moment("end", log.row(session.step, {}), log, result)
        return result


def _train(
    session: Session, agenda: Agenda, log: Log, saver: Saver, stop: StopRequest
) -> Generator[Moment, None, None]:
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
            log.new.append(("checkpoint", log.row(session.step, {})))
        if (yield from _told(log, saver)):
            break
    log.collect(last=True, rest=not stop)
    yield from _told(log, saver)


def _told(log: Log, saver: Saver) -> Generator[Moment, None, bool]:
    """Yields what is new, and saves the state if it was asked for. *Returns* whether to stop."""
    stopping = False
    while log.new:
        moment = Moment(*log.new.popleft(), log)
        try:
            with log.meter.section("own_code", unless_busy=True):
                yield moment
        except GeneratorExit:
            if log.session.placement.hosts.count == 1:  # others may not have left the loop
                with contextlib.suppress(ReplicaDiffers):  # what may be wrong is not saved
                    log.collect(last=True)
                    saver.save_last()
            raise
        finally:
            moment.over = True
        with fixed():  # the code may have changed JAX's settings
            stops, saves = log.session.placement.agree("moment", [moment.stopping, moment.saving])
        stopping |= stops
        if saves:
            log.collect(last=True)
            saver.save()
    return stopping
