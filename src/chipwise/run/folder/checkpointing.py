"""When to write a checkpoint, its content, and the state with which a run begins.

Host 0 alone reads and writes checkpoints. A checkpoint has the arrays of the state by path, the
recipe, the position in the run, and a digest of both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ...base import RunError, fact
from ...step.state import NotFinite, TrainState, finite
from ..meter import Meter
from ..progress import Reporter
from ..run_schedule import Agenda
from ..session import Session
from .checkpoint import Checkpoints
from .early_stopping import FOLDER, EarlyStopping
from .run_folder import RunFolder
from .run_reader import number

SECONDS_BETWEEN_SAVES = 30.0  # at least, unless `checkpoint_every` is given


class Saver:
    """The checkpoints of one run, if it has a folder. Only host 0 reads and writes them.

    *Arguments:* `folder`: the run folder on host 0, `None` without one and on other hosts. `best`:
    decides which state is kept as the best.

    *Fields:* `run`: the folder's path, on every host. `best`.

    Methods that write a state raise `NotFinite` if its parameters are not finite.
    """

    def __init__(
        self,
        session: Session,
        folder: RunFolder | None,
        meter: Meter,
        agenda: Agenda,
        best: EarlyStopping,
    ):
        self.session, self.best = session, best
        self.run = session.placement.agree("run", None if folder is None else str(folder.path))
        self._folder, self._meter, self._agenda = folder, meter, agenda
        self._checkpoints = (
            Checkpoints(folder.path / "checkpoints", False, agenda.newest, agenda.keep, held=folder)
            if folder is not None
            else None
        )
        self._best: Checkpoints | None = None
        self._saved_at, self._last = -1, 0.0

    def restore(self, reporter: Reporter) -> TrainState | None:
        """Returns the newest readable checkpoint, the same on every host, or `None` when there is
        none. The meter continues from its seconds.

        Raises `CheckpointError` when none is readable, or when it is of another model.
        """
        self._reporter = reporter
        template, placement = (
            self.session.state_layout.template.without("saved"),
            self.session.placement,
        )
        shards = self.session.layout.shards
        restored = None
        if self._checkpoints is not None:
            if self._saved_at >= 0:  # this process goes back, and may be writing one
                self._checkpoints.wait()
            restored = self._checkpoints.restore(template, reporter.warn, shards)
        step = placement.agree("found", None if restored is None else int(restored[0].step))
        self.session.verifier.go_on((restored or (None, {}))[1].get("verified"))
        if step is None:
            return None
        state, about = restored or (template, {})
        if shards == 1:  # with groups, `Grouped.put` sends it from device to device
            state = placement.broadcast(state, template)
        if self._saved_at < 0:  # not if this process goes back
            self._meter.earlier = number(about.get("seconds")) or 0.0
        self._saved_at = step
        reporter.say(fact("resumed", step=self._saved_at, total=self._agenda.total, run=self.run))
        return state

    def begin(self) -> None:
        """Waits for the state, and starts to measure the time between checkpoints."""
        self.session.wait()
        self._last = self._meter.total()

    def due(self) -> bool:
        """Whether to write a checkpoint after the step that was started last."""
        step = self.session.step
        if self.run is None or step in self._agenda.keep:
            return self.run is not None
        if step not in self._agenda.save:
            return False
        waited = self._meter.total() - self._last >= SECONDS_BETWEEN_SAVES
        return self._agenda.save_always or self.session.placement.agree("save", waited)

    def save(self) -> None:
        """Starts to write a checkpoint of the current state, unless that is done."""
        if self._saved_at == self.session.step:
            return
        self._write(self._checkpoints)
        self._saved_at, self._last = self.session.step, self._meter.total()

    def forget(self, after: int) -> None:
        """Moves checkpoints of steps after `after` away: a device may have computed wrongly
        in these."""
        if self._checkpoints is not None:
            self._checkpoints.wait()
            self._checkpoints.set_aside(
                [step for step in self._checkpoints.steps() if step > after]
            )

    def keep_best(self, metrics: Mapping[str, Any]) -> None:
        """Keeps the state that was just evaluated, if its `metrics` are the best so far, and
        decides whether the run ends early. Waits until it is on disk, since a later checkpoint must
        not exist without it."""
        step, agree = self.session.step, self.session.placement.agree
        if not self.best.metric:
            return
        if agree("best", self.best.improved(step, metrics)):
            if self._folder is not None and self._best is None:
                self._best = Checkpoints(self._folder.path / FOLDER, held=self._folder)
            # An earlier process of the run may have written it
            if not agree("best exists", self._best is not None and step in self._best.steps()):
                self._write(self._best)
                with self._writing():
                    if self._best is not None:
                        self._best.wait()
        self.best.over = agree("patience", self.best.waited_enough(step))
        kept = self.best.kept(True)
        if kept and kept.value is None and self.best.since == step:  # the first evaluation
            self._reporter.warn(fact("best-not-a-number", metric=kept.metric, step=step))
        if kept and self.best.over and step < self.session.total:
            self._reporter.say(kept.story(step, self.session.total))
        # At the end; before, a run that goes on from an earlier step may need one
        if step == self._saved_at:
            self._remove_older_bests()

    def rewind_best(self, rows: list[dict[str, Any]]) -> None:
        """Continues `best` from the run's `rows`. Removes best checkpoints of later evaluations,
        which a resumed run computes again, maybe at other steps."""
        if not self.best.metric:
            return
        kept: list[int] = []
        if self._folder is not None and (self._folder.path / FOLDER).is_dir():
            self._best = Checkpoints(self._folder.path / FOLDER, held=self._folder)
            kept = self._best.keep(0, self.session.step)
        self.best.go_on(rows, kept, self.session.step, self.session.placement.agree)
        self._remove_older_bests()

    def _remove_older_bests(self) -> None:
        if self._best is not None:
            self._best.keep(self.best.step, self.session.step)

    def _write(self, checkpoints: Checkpoints | None) -> None:
        session = self.session
        session.verifier.collect(session.step)
        with self._writing():
            host = session.snapshot().without("saved")
            if not finite(host.params):
                raise NotFinite("parameter-not-finite", session.step, math.nan)
            about: dict[str, Any] = {
                "step": session.step,
                "recipe": session.recipe.describe(),
                "seconds": self._meter.run_seconds,
                "verified": session.verifier.json(),
            }
            if self._folder is not None:
                about["ledger"] = self._folder.ledger
            if checkpoints is not None:
                checkpoints.save(session.step, host, about, session.state_layout.saved_axes)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """The meter's section of what a folder that was moved or deleted would end."""
        place = self._folder.writing() if self._folder else contextlib.nullcontext()
        with self._meter.section("checkpoint"), place:
            yield

    def save_last(self) -> None:
        """Waits for all steps, saves the state unless it is saved, and waits until it is on disk.
        Every host waits, since one that exits before would count as lost."""
        self.session.wait()
        if self.run is None:
            return
        self.save()
        with self._writing():
            if self._checkpoints is not None:
                self._checkpoints.wait()
            self.session.placement.agree("saved", self.session.step)
        self._remove_older_bests()

    def newest(self) -> int | None:
        """Returns the step of the newest checkpoint, or `None` without one. Waits for the one being
        written."""
        if self._checkpoints is None:
            return None
        with contextlib.suppress(RunError):  # a full disk must not hide why the run ends
            self._checkpoints.wait()
        return max(self._checkpoints.steps(), default=None)

    def close(self) -> None:
        # The newer one first, since they nest a hook
        for checkpoints in (self._best, self._checkpoints):
            if checkpoints is not None:
                checkpoints.close()
