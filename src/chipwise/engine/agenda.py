"""When something is due: the steps after which a run logs, evaluates, saves and ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from ..recipe.duration import Clock, Marks

MANY = 5000  # steps of a run from which a trial of several steps a call, which compiles twice, can pay


@dataclass(frozen=True)
class Agenda:
    """The steps after which something is due; `last` is where this process stops, `total` the run's end.

    Whether a checkpoint is due also depends on the seconds since the last one, unless an interval was
    asked for (`save_always`).
    """

    total: int
    last: int
    log: Marks
    evaluate: Marks
    save: Marks
    save_always: bool

    def until_next(self, step: int) -> int:
        """Steps from `step` to the next after which something is due."""
        after = (marks.after(step) for marks in (self.log, self.evaluate, self.save))
        due = [mark for mark in (*after, self.last) if mark is not None and mark > step]
        return min(due) - step

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
        last = total if stop_after is None else min(total, clock.steps(stop_after))

        logged = f"{max(1, min(200, total // 25))}st" if log_every is None else log_every
        saved = f"{max(1, total // 20)}st" if checkpoint_every is None else checkpoint_every

        def marks(every: str | None) -> Marks:
            never = Marks(Fraction(total + 1), total)
            return never if every is None or not total else clock.marks(every)

        return cls(
            total=total,
            last=last,
            log=replace(marks(logged), also=last),
            evaluate=replace(marks(eval_every), but=last),
            save=replace(marks(saved), but=last),
            save_always=checkpoint_every is not None,
        )
