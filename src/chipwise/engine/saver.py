"""Whether a checkpoint is due, what it holds, and where a run begins: from its newest one, or anew."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from ..errors import RunError
from ..words.facts import fact
from .agenda import Agenda
from .best import FOLDER
from .checkpoint import Checkpoints
from .meter import Meter
from .progress import Reporter
from .run_folder import RunFolder
from .session import Session
from .state import TrainState, finite
from .stored import number

if TYPE_CHECKING:
    from .log import Log

SECONDS_BETWEEN_SAVES = 30.0  # unless an interval was asked for


class Saver:
    """The checkpoints of one run; without a folder, none. Host 0 alone reads and writes them.

    *Arguments:* `run`, the folder's path, known to every host; `None` keeps nothing.

    *Fields:* `seconds`: the wall time of the run up to the checkpoint that `restore` read.
    """

    def __init__(self, folder: RunFolder | None, run: str | None, meter: Meter, agenda: Agenda):
        self._folder, self._run, self._meter, self._agenda = folder, run, meter, agenda
        self._checkpoints = Checkpoints(folder.checkpoints) if folder is not None else None
        self._best: Checkpoints | None = None
        self._saved_at, self._last = -1, 0.0
        self.seconds = 0.0

    def restore(self, session: Session, reporter: Reporter) -> TrainState | None:
        """The newest readable checkpoint, the same on every host; `None` when there is none.

        Raises `CheckpointError` when none is readable, or it is of another model.
        """
        template, placement, shards = (
            session.template.without("saved"),
            session.placement,
            session.layout.shards,
        )
        found = None
        if self._checkpoints is not None:
            found = self._checkpoints.restore(template, reporter.warn, shards)
        step = placement.agree("found", None if found is None else int(found[0].step))
        if step is None:
            return None
        state, about = found or (template, {})
        if shards == 1:  # with groups, devices send it to devices: see `GroupPrograms.put`
            state = placement.broadcast(state, template)
        self._saved_at = step
        self.seconds = number(about.get("seconds")) or 0.0
        reporter.say(fact("resumed", step=self._saved_at, total=self._agenda.total, run=self._run))
        return state

    def begin(self) -> None:
        """Steps begin: the time between checkpoints counts from here."""
        self._last = self._meter.total()

    def due(self, session: Session) -> bool:
        """Whether a checkpoint is to be written after the step that was begun last."""
        if self._run is None or session.step not in self._agenda.save:
            return False
        waited = self._meter.total() - self._last >= SECONDS_BETWEEN_SAVES
        return self._agenda.save_always or session.placement.agree("save", waited)

    def save(self, session: Session, log: Log) -> None:
        """Begins a checkpoint of the current state. Raises `DivergedError` rather than keep NaNs."""
        self._write(self._checkpoints, session, log)
        self._saved_at, self._last = session.step, self._meter.total()

    def save_best(self, session: Session, log: Log) -> None:
        """The same into the folder of the best evaluation, unless an earlier process of the run did so. It is
        on disk when this returns: a later checkpoint must not be there without it."""
        if self._folder is not None and self._best is None:
            self._best = Checkpoints(self._folder.path / FOLDER)
        held = self._best is not None and session.step in self._best.steps()
        if not session.placement.agree("held", held):
            self._write(self._best, session, log)
            with self._meter.section("checkpoint"):
                if self._best is not None:
                    self._best.wait()

    def rewind_best(self, step: int) -> list[int]:
        """Removes best checkpoints of evaluations after `step`, which a resumed run makes again, maybe at
        other steps. *Returns* the steps of the others."""
        if self._folder is None or not (self._folder.path / FOLDER).is_dir():
            return []
        self._best = Checkpoints(self._folder.path / FOLDER)
        return self._best.rewind(step)

    def _write(self, to: Checkpoints | None, session: Session, log: Log) -> None:
        with self._meter.section("checkpoint"):
            host = session.snapshot().without("saved")
            if not finite(host.params):
                raise log.diverged("parameter-not-finite", session.step, math.nan)
            about: dict[str, Any] = {
                "step": session.step,
                "recipe": session.recipe.describe(),
                "seconds": log.seconds,
            }
            if to is not None:
                to.save(session.step, host, about, session.saved_axes)

    def save_last(self, session: Session, log: Log) -> None:
        """Waits for the steps begun, saves the state unless it is saved, and waits until it is on disk: every
        host, since one that left before would be taken for lost."""
        session.wait()
        if self._run is None:
            return
        if self._saved_at != session.step:
            self.save(session, log)
        with self._meter.section("checkpoint"):
            if self._checkpoints is not None:
                self._checkpoints.wait()
            session.placement.agree("saved", session.step)

    def newest(self) -> int | None:
        """The step of the newest checkpoint, once what is being written is complete; `None` without one."""
        if self._checkpoints is None:
            return None
        with contextlib.suppress(RunError):  # a full disk must not hide why the run ends
            self._checkpoints.wait()
        return max(self._checkpoints.steps(), default=None)

    def close(self) -> None:
        for checkpoints in (self._best, self._checkpoints):  # the later one first, as they share a hook
            if checkpoints is not None:
                checkpoints.close()
