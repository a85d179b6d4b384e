"""`training`: the training loop, from a recipe to a result. Read it from top to bottom."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from ..base import DataError, Fact, fact
from ..base.annotations import as_annotated
from ..data.class_names import alike, names_in, told
from ..data.readings import classes_of, readings
from ..data.sources import Columns
from ..machine.arithmetic import fixed
from ..recipe.check import Finding, misleading
from ..recipe.recipe import Recipe
from ..recipe.task import Task
from ..step.state import refuse_part
from . import neighbours
from .event import Event
from .folder.checkpointing import Saver
from .folder.early_stopping import EarlyStopping
from .folder.ledger import Ledger
from .folder.result import Result
from .folder.run_folder import RunFolder
from .log import Log
from .meter import Meter
from .on import ALL, On
from .open_loops import closed_at_exit
from .progress import Reporter
from .run_schedule import Agenda
from .session import Session
from .signals import StopRequest
from .tracking import Tracking
from .tune import in_folder
from .verify import ReplicaDiffers
from .watchdog import watched


@as_annotated
@closed_at_exit
def training(
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
    better: Mapping[str, str] = {},
    fresh: bool = False,
    changed_code: bool = False,
    track: str | Sequence[str] = (),
    progress: str = "auto",
) -> Generator[Event, None, Result]:
    """The training of `fit`, as a loop in which your code runs at its events:

        for event in cw.training(recipe, run="runs/mine"):
            if event.kind == "evaluation" and event.metrics["eval/accuracy"] > 0.95:
                event.stop()
        print(event.result.fingerprint)

    *Yields* an `Event` after each row of metrics, evaluation and checkpoint, and at the end, with
    the `result`. The loop's code changes no bit. The time for which a device waits for it is
    `seconds["own_code"]`, and no part of any speed. A loop that is left saves its state, also at
    the end of the program, and the same call resumes the run.

    The arguments, the errors, and JAX's settings within the loop are those of `fit`.
    """
    with fixed(), Tracking(track, run) as tracking, contextlib.ExitStack() as closing:
        # ---- hosts, schedule, devices and data: checked before anything is written or compiled
        here = closing.enter_context(watched(on.stuck))
        best, meter = EarlyStopping.of(recipe, keep_best, patience, run), Meter(recipe.batch)
        reporter = Reporter(progress if here.first else "silent")
        closing.callback(reporter.stop)
        agenda = Agenda.of(
            recipe.clock, eval_every, log_every, checkpoint_every, stop_after, keep, ledger
        )
        session = closing.enter_context(_session(recipe, in_folder(on, None if fresh else run)))
        reporter.introduce(session.start, session.warnings)
        for notice in _first_lines(recipe.task):
            reporter.say(notice)
        reporter.say(best.check(session, better))

        # ---- the run folder, and the state: resumed or new
        folder = closing.enter_context(RunFolder.opened(run, session, fresh))
        tracking.begin(folder.path if folder else None, reporter)
        saver = closing.enter_context(
            contextlib.closing(Saver(session, folder, meter, agenda, best))
        )
        few = _begun(session, saver, reporter, agenda.last)
        # Until here a signal ends the process at once, as nothing is trained yet
        stop = closing.enter_context(contextlib.closing(StopRequest()))
        log = Log(
            session, meter, reporter, folder, Ledger(session, folder, saver, agenda, changed_code)
        )

        # ---- train
        if log.begin < agenda.last:
            if folder is not None:
                closing.enter_context(folder.process(session, best, changed_code))
            _compiled(session, few, reporter, meter, agenda.last - session.step)
            for doubt in misleading(recipe):
                reporter.warn(Finding(doubt).sentence)
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
        end = Event("end", log.row(session.step, {}), log, result)
        with contextlib.suppress(GeneratorExit):  # to leave the loop at its end is no stop
            yield end
        end.over = True
        return result


def _session(recipe: Recipe, on: On) -> Session:
    """The session. Raises `RecipeError` for an optimizer of a part of the parameters."""
    session = Session(recipe, on)
    refuse_part(recipe, session.abstract.params)
    return session


def _first_lines(task: Task) -> list[Fact | None]:
    """What is said of how data and weights were read."""
    return [task.shown, *classes_of(task), *readings(task), told(task), *alike(names_in(task))]


def _begun(session: Session, saver: Saver, reporter: Reporter, last: int) -> Columns:
    """Begins at the saved state, or at the first one. *Returns* a few examples for
    `neighbours.tell`, which are read before the feed reads in its own threads. A run that continues
    has none."""
    state = saver.restore(reporter)
    few = neighbours.few_examples(session.recipe) if state is None else {}
    session.begin(state, last=last)
    return few


def _compiled(session: Session, few: Columns, reporter: Reporter, meter: Meter, steps: int) -> None:
    """Reports what is known of data and loss before the first of `steps` steps, and compiles the
    step."""
    reporter.say(session.data)
    neighbours.tell(session, few, reporter)
    meter.seconds["start"] = meter.total()
    with meter.section("compile"), reporter.waiting("compiling"):
        session.compile(steps)
    if session.calls.most > 1:
        reporter.say(fact("many-steps", steps=session.calls.most))
    elif session.calls.asked > 1:
        reporter.say(fact("many-steps-single", asked=session.calls.asked))


def _train(
    session: Session, agenda: Agenda, log: Log, saver: Saver, stop: StopRequest
) -> Generator[Event, None, None]:
    """Steps until `agenda.last`, a stop or the end of patience. The host reads metrics one step
    late."""
    saver.begin()
    stopping = False
    if log.missed(agenda):
        log.evaluate()
        saver.keep_best(log.final)
        stopping = yield from _told(log, saver)
    log.meter.mark(session.step, first=True)
    while (
        not stopping
        and session.step < agenda.last
        and not stop.reached(log.reporter.console.gone)
        and not saver.best.over
    ):
        try:
            advanced = session.advance(_room(session, agenda, log), stopped=lambda: stop.alone)
        except DataError:  # the steps before what cannot be used are kept
            if session.step > log.begin:
                _saved(log, saver)
            raise
        if not advanced:
            break
        log.collect()
        if session.step not in agenda.due and not log.new:
            continue
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


def _room(session: Session, agenda: Agenda, log: Log) -> int:
    """The number of steps to start at once. After a step with a row it is one, since the row's
    event comes then, and may stop the run."""
    due = agenda.due.after(session.step) if session.calls.most > 1 and not log.unread else None
    return 1 if due is None else min(due - session.step, session.calls.most)


def _told(log: Log, saver: Saver) -> Generator[Event, None, bool]:
    """Yields the new events, and saves the state if one asks for it. *Returns* whether to stop."""
    stopping = False
    while log.new:
        event = Event(*log.new.popleft(), log)
        try:
            with log.meter.section("own_code", unless_busy=True):
                yield event
        except GeneratorExit:
            _saved(log, saver)
            raise
        finally:
            event.over = True
        with fixed():  # the code may have changed JAX's settings
            stops, saves = log.session.placement.agree("event", [event.stopping, event.saving])
        stopping |= stops
        if saves:
            log.collect(last=True)
            saver.save()
    return stopping


def _saved(log: Log, saver: Saver) -> None:
    """Saves the state of a loop that is left, on one host: others may not have left it."""
    if log.session.placement.hosts.count == 1:
        with contextlib.suppress(ReplicaDiffers):  # what may be wrong is not saved
            log.collect(last=True)
            saver.save_last()
