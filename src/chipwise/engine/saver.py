"""When to write a checkpoint, its content, and the state with which a run begins."""

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

SECONDS_BETWEEN_SAVES = 30.0  # at least, unless `checkpoint_every` is given


class Saver:
    """The checkpoints of one run, if it has a folder. Only host 0 reads and writes them.

    *Arguments:* `folder`, only on host 0; `run`, the folder's path, on every host; `None` without a folder.

    *Fields:* `seconds`: the run's wall time at the checkpoint that `restore` read.
    """

    def __init__(self, folder: RunFolder | None, run: str | None, meter: Meter, agenda: Agenda):
        self._folder, self._run, self._meter, self._agenda = folder, run, meter, agenda
        self._checkpoints = Checkpoints(folder.checkpoints) if folder is not None else None
        self._best: Checkpoints | None = None
        self._saved_at, self._last = -1, 0.0
        self.seconds = 0.0

    def restore(self, session: Session, reporter: Reporter) -> TrainState | None:
        """The newest readable checkpoint, the same on every host; `None` when there is none.

        Raises `CheckpointError` when none is readable, or when it is of another model.
        """
        template, placement = session.template.without("saved"), session.placement
        shards = session.layout.shards
        restored = None
        if self._checkpoints is not None:
            restored = self._checkpoints.restore(template, reporter.warn, shards)
        step = placement.agree("found", None if restored is None else int(restored[0].step))
        if step is None:
            return None
        state, about = restored or (template, {})
        if shards == 1:  # with groups, `GroupPrograms.put` sends it from device to device
            state = placement.broadcast(state, template)
        self._saved_at = step
        self.seconds = number(about.get("seconds")) or 0.0
        reporter.say(fact("resumed", step=self._saved_at, total=self._agenda.total, run=self._run))
        return state

    def begin(self) -> None:
        """Starts to measure the time between checkpoints."""
        self._last = self._meter.total()

    def due(self, session: Session) -> bool:
        """Whether to write a checkpoint after the step that was started last."""
        if self._run is None or session.step not in self._agenda.save:
            return False
        waited = self._meter.total() - self._last >= SECONDS_BETWEEN_SAVES
        return self._agenda.save_always or session.placement.agree("save", waited)

    def save(self, session: Session, log: Log) -> None:
        """Starts to write a checkpoint of the current state. Raises `DivergedError` if it is not finite."""
        self._write(self._checkpoints, session, log)
        self._saved_at, self._last = session.step, self._meter.total()

    def save_best(self, session: Session, log: Log) -> None:
        """Writes a checkpoint to the folder of the best evaluation, unless an earlier process of the run has
        done so. Waits until it is on disk, since a later checkpoint must not exist without it."""
        if self._folder is not None and self._best is None:
            self._best = Checkpoints(self._folder.path / FOLDER)
        exists = self._best is not None and session.step in self._best.steps()
        if not session.placement.agree("best exists", exists):
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

    def _write(self, checkpoints: Checkpoints | None, session: Session, log: Log) -> None:
        with self._meter.section("checkpoint"):
            host = session.snapshot().without("saved")
            if not finite(host.params):
                raise log.diverged("parameter-not-finite", session.step, math.nan)
            about: dict[str, Any] = {
                "step": session.step,
                "recipe": session.recipe.describe(),
                "seconds": log.seconds,
            }
            if checkpoints is not None:
                checkpoints.save(session.step, host, about, session.saved_axes)

    def save_last(self, session: Session, log: Log) -> None:
        """Waits for all steps, saves the state unless it is saved, and waits until it is on disk. Every host
        waits, since one that exits before would count as lost."""
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
        """The step of the newest checkpoint, after waiting for the one being written; `None` without one."""
        if self._checkpoints is None:
            return None
        with contextlib.suppress(RunError):  # a full disk must not hide why the run ends
            self._checkpoints.wait()
        return max(self._checkpoints.steps(), default=None)

    def close(self) -> None:
        for checkpoints in (self._best, self._checkpoints):  # the newer one first, since they nest a hook
            if checkpoints is not None:
                checkpoints.close()
