"""Whether a checkpoint is due, what it holds, and where a run begins: from its newest one, or anew."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..words.facts import fact
from .agenda import Agenda
from .checkpoint import Checkpoints
from .meter import Meter
from .progress import Reporter
from .run_folder import RunFolder
from .session import Session
from .state import TrainState
from .stored import number

if TYPE_CHECKING:
    from .log import Log

SECONDS_BETWEEN_SAVES = 30.0  # unless an interval was asked for


class Saver:
    """The checkpoints of one run; without a folder, none.

    *Fields:* `seconds`: the wall time of the run up to the checkpoint that `restore` read.
    """

    def __init__(self, folder: RunFolder | None, meter: Meter, agenda: Agenda):
        self._folder, self._meter, self._agenda = folder, meter, agenda
        self._checkpoints = Checkpoints(folder.checkpoints) if folder is not None else None
        self._saved_at, self._last = -1, 0.0
        self.seconds = 0.0

    def restore(self, template: TrainState, reporter: Reporter) -> TrainState | None:
        """The newest readable checkpoint; `None` when there is none.

        Raises `CheckpointError` when none is readable, or it is of another model.
        """
        template = template.without("saved")
        found = self._checkpoints.restore(template, reporter.warn) if self._checkpoints is not None else None
        if found is None:
            return None
        state, about = found
        self._saved_at = int(state.step)
        self.seconds = number(about.get("seconds")) or 0.0
        assert self._folder is not None
        total = self._agenda.total
        reporter.say(fact("resumed", step=self._saved_at, total=total, run=str(self._folder.path)))
        return state

    def begin(self) -> None:
        """Steps begin: the time between checkpoints counts from here."""
        self._last = self._meter.total()

    def due(self, session: Session) -> bool:
        """Whether a checkpoint is to be written after the step that was begun last."""
        if self._checkpoints is None or session.step not in self._agenda.save:
            return False
        waited = self._meter.total() - self._last >= SECONDS_BETWEEN_SAVES
        return session.placement.agree(self._agenda.save_always or waited)

    def save(self, session: Session, log: Log) -> None:
        """Begins a checkpoint of the state as it is. Raises `DivergedError` rather than keep NaNs."""
        assert self._checkpoints is not None
        with self._meter.section("checkpoint"):
            host = session.snapshot().without("saved")
            if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(host.params)):
                raise log.diverged("parameter-not-finite", session.step, math.nan)
            about: dict[str, Any] = {
                "step": session.step,
                "recipe": session.recipe.describe(),
                "seconds": log.seconds,
            }
            self._checkpoints.save(session.step, host, about)
            self._saved_at, self._last = session.step, self._meter.total()

    def save_last(self, session: Session, log: Log) -> None:
        """Waits for the steps begun, saves the state unless it is saved, and waits until it is on disk."""
        session.wait()
        if self._checkpoints is None:
            return
        if self._saved_at != session.step:
            self.save(session, log)
        with self._meter.section("checkpoint"):
            self._checkpoints.wait()

    def newest(self) -> int | None:
        """The step of the newest checkpoint, once what is being written is complete; `None` without one."""
        if self._checkpoints is None:
            return None
        self._checkpoints.wait()
        return max(self._checkpoints.steps(), default=None)

    def close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
