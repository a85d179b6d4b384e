"""The schedule of a run: the steps after which it logs, evaluates, saves and ends."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ..base import invalid
from ..recipe.duration import Clock, Marks

KEEP = 3  # checkpoints by default: enough to fall back twice


@dataclass(frozen=True)
class AnyOf:
    """The steps of any of several marks, and the `last` one."""

    marks: tuple[Marks, ...]
    last: int
    _next: list[int] = field(default_factory=lambda: [0, -1], compare=False, repr=False)
    """A step, and the first one from there on that is one of these. A loop asks of every step, and
    a small net's step takes less time than to ask all marks."""

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and self.after(step - 1) == step

    def after(self, step: int) -> int | None:
        """The first one after `step`."""
        first, due = self._next
        if not first <= step + 1 <= due:
            found = [mark for one in self.marks if (mark := one.after(step)) is not None]
            due = min((mark for mark in (*found, self.last) if mark > step), default=step)
            self._next[:] = step + 1, due
        return due if due > step else None


@dataclass(frozen=True)
class Agenda:
    """The steps after which something is due. A run logs, evaluates and writes its ledger after the
    same steps wherever its processes stop."""

    total: int
    """The run's last step."""
    last: int
    """The last step of this process."""
    log: Marks
    """The steps after which to log."""
    evaluate: Marks
    """The steps after which to evaluate."""
    save: Marks
    """The steps after which to save."""
    save_always: bool
    """Whether to save after all steps in `save`. Otherwise some seconds must also have passed since
    the last checkpoint."""
    newest: int
    """How many of the newest checkpoints are kept."""
    keep: Marks
    """The steps whose checkpoints are also kept."""
    ledger: AnyOf
    """The steps with a row in the ledger."""
    due: AnyOf
    """All of these, and the process's last step."""

    @classmethod
    def of(
        cls,
        clock: Clock,
        eval_every: str | None,
        log_every: str | None,
        checkpoint_every: str | None,
        stop_after: str | None,
        keep: int | str | None = None,
        ledger: str | None = None,
    ) -> Agenda:
        """Returns the agenda for durations, or "end" for the end alone. By default, a run has some
        25 log rows and 20 possible checkpoints."""
        total = clock.total or 0
        last = total if stop_after is None else min(total, clock.steps(stop_after))

        often = f"{max(1, min(200, total // 25))}st" if log_every is None else log_every
        safe = f"{max(1, total // 20)}st" if checkpoint_every is None else checkpoint_every

        def marks(every: str | None) -> Marks:
            never = Marks(Fraction(total + 1), total)
            return never if every is None or not total else clock.marks(every)

        evaluated, logged, saved = (
            marks(None if every == "end" else every) for every in (eval_every, often, safe)
        )

        newest = int(str(keep)) if re.fullmatch("[0-9]+", str(keep)) else None
        if newest == 0:
            raise invalid(
                "keep-range", "keep", keep, "a number of checkpoints of at least 1, or a duration"
            )
        kept = marks(str(keep) if keep is not None and newest is None else None)
        every = (logged, evaluated, saved, kept)
        rows = AnyOf(every if ledger is None else (marks(ledger), kept), total)
        return cls(
            total=total,
            last=last,
            log=replace(logged, also=total),
            evaluate=replace(evaluated, also=total),
            save=replace(saved, but=last),
            save_always=checkpoint_every is not None,
            newest=newest or KEEP,
            keep=kept,
            ledger=rows,
            due=AnyOf((replace(logged, also=total), *every, *rows.marks), last),
        )
