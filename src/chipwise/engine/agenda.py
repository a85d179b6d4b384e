"""When something is due: the steps after which a run logs, evaluates, saves and ends."""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass

from ..recipe.duration import Clock

MANY = 5000  # steps of a run from which a trial of several steps a call, which compiles twice, can pay


@dataclass(frozen=True)
class Agenda:
    """The steps after which something is due; `last` is where this process stops, `total` the run's end.

    Whether a checkpoint is due also depends on the seconds since the last one, unless an interval was
    asked for (`save_always`).
    """

    total: int
    last: int
    log: frozenset[int]
    evaluate: frozenset[int]
    save: frozenset[int]
    save_always: bool

    @functools.cached_property
    def _marks(self) -> list[int]:
        return sorted(self.log | self.evaluate | self.save | {self.last})

    def until_next(self, step: int) -> int:
        """Steps from `step` to the next after which something is due."""
        return self._marks[bisect.bisect_right(self._marks, step)] - step

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
        last = min(total, clock.steps(stop_after)) if stop_after else total

        def marks(every: str | None) -> frozenset[int]:
            return frozenset(clock.marks(every)) if every and total else frozenset()

        return cls(
            total=total,
            last=last,
            log=marks(log_every or f"{max(1, min(200, total // 25))}st") | {last},
            evaluate=marks(eval_every) - {last},
            save=marks(checkpoint_every or f"{max(1, total // 20)}st") - {last},
            save_always=checkpoint_every is not None,
        )
