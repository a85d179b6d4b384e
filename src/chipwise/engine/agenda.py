"""The schedule of a run: the steps after which it logs, evaluates, saves and ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from ..recipe.duration import Clock, Marks


@dataclass(frozen=True)
class Agenda:
    """The steps after which something is due.

    *Fields:* `total`, the run's last step; `last`, the last step of this process; `log`, `evaluate`, `save`,
    the steps; `save_always`: otherwise `save` also requires some seconds since the last checkpoint. A run
    logs and evaluates after the same steps wherever its processes stop.
    """

    total: int
    last: int
    log: Marks
    evaluate: Marks
    save: Marks
    save_always: bool

    @classmethod
    def of(
        cls,
        clock: Clock,
        eval_every: str | None,
        log_every: str | None,
        checkpoint_every: str | None,
        stop_after: str | None,
    ) -> Agenda:
        """From durations; by default some 25 log rows and 20 possible checkpoints per run."""
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
            log=replace(marks(logged), also=total),
            evaluate=replace(marks(eval_every), also=total),
            save=replace(marks(saved), but=last),
            save_always=checkpoint_every is not None,
        )
