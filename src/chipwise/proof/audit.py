"""`audit`: parts of a run are computed again, and compared with its ledger and its rows bit by bit."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..engine.checkpoint import state_of
from ..engine.ledger import head_of, of_other_data
from ..engine.on import ALL, On
from ..engine.session import Session
from ..engine.stored import (
    DIGESTS,
    StoredLedger,
    StoredRun,
    disagreement,
    metrics_of,
    read_ledger,
    read_run,
    sha_of,
)
from ..errors import ChipwiseError, RecipeError, RunError
from ..machine.arithmetic import fixed
from ..recipe.recipe import Recipe, difference
from ..recipe.task import finished
from ..words.facts import Fact, fact, plain

FILE = "audit.json"
SCHEMA = "chipwise.audit/1"
APART = 0.02
"""The relative difference of a metric up to which another kind of chip may have computed it: over the few
steps of an interval, the products' precision moves a loss by less."""


@fixed()
def audit(
    run: str | Path,
    recipe: Recipe,
    *,
    steps: str | None = None,
    every: str | None = None,
    on: On = ALL,
    say: Callable[[Fact], None] = lambda _: None,
) -> tuple[Fact, dict[str, Any]]:
    """Computes parts of a run again, from the checkpoint before each, and compares them with its ledger,
    metrics and checkpoints. Writes nothing.

    *Arguments:* `recipe` of the run; `steps`, such as `"4000:4100"`, what to compute again, `"0:"` for all;
    `every`: a duration, as long as which there is one interval up to the next row; by default one after each
    checkpoint and at the beginning. `say` is called before each interval.

    *Returns* the verdict, and a statement that others can check, as JSON values: `passed`; the digests of
    `recipe`, `data` and `ledger`; `computed`, by what it was audited; `same_bits`: whether bits were
    compared, which needs the run's kind of chip, otherwise metrics within `APART`; `made`, the intervals
    (after, to) that were computed again, of so many `steps`, and the number of `rows` that were compared
    there; `found`, all that differs from what the run says, first of all the first row; and its own SHA-256
    as `digest`.

    Raises `RunError` for a folder without run or ledger, and `RecipeError` for `steps` out of range.
    """
    stored = read_run(run)
    ledger = read_ledger(stored.path)
    if ledger is None or not ledger.rows:
        text = "{run} has no ledger.jsonl with a row: it was trained by an older version, or only began."
        raise RunError("run-without-ledger", text, run=str(run))
    with Session(recipe, on) as session:
        replay, made, found = _Replay(stored, ledger, session), list[tuple[int, int]](), list[Fact]()
        for low, high in _intervals(ledger, stored, recipe, steps, every):
            say(fact("audit-interval", "steps {low} to {high}", low=low, high=high))
            made.append((low, high))
            if (differs := replay.begun(low) or replay.followed(high)) is not None:
                found.append(differs)
                break
        head = replay.head
        found += _changes(stored, ledger, recipe, head)
    facts = {"run": str(run), "rows": replay.rows, "steps": sum(b - a for a, b in made)}
    text = "{run} is what its recipe and data make: {rows:count row} of {steps:count step} to the bit."
    if not replay.exact:
        text = "Another kind of chip than that of {run} has other bits: metrics of {steps:count step} agree."
    verdict = found[0] if found else fact("audit-passed", text, **facts)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    statement = {"schema": SCHEMA, "time": now, "passed": not found, "verdict": verdict, "found": found}
    statement |= {**head, **facts, "ledger": ledger.digest, "same_bits": replay.exact, "made": made}
    document = json.loads(json.dumps(plain(statement), default=str))
    return verdict, {**document, "digest": sha_of(document)}


def _changes(stored: StoredRun, ledger: StoredLedger, recipe: Recipe, head: dict[str, Any]) -> Iterator[Fact]:
    """What differs from what the run states of itself, besides what computes it."""
    run = str(stored.path)
    if changed := disagreement(stored.recipe, recipe.describe()):
        yield fact(
            "audit-other-recipe", "The recipe is not {run}'s: {changed:changes}.", run=run, changed=changed
        )
    for name, digest in head["data"].items():
        there = ledger.heads[0]["data"].get(name)
        if of_other_data(digest, there):
            facts = {"here": digest[:16], "there": str(there)[:16]}
            yield fact("audit-other-data", name=name, run=run, **facts)
    stated = (stored.result or {}).get("ledger")
    if isinstance(stated, str) and stated != ledger.digest:
        yield fact("audit-other-ledger", run=run)


def _intervals(
    ledger: StoredLedger, stored: StoredRun, recipe: Recipe, steps: str | None, every: str | None
) -> list[tuple[int, int]]:
    """The intervals (after, to) to compute again, apart from each other and in order."""
    rows = sorted(ledger.rows)
    starts = [0, *(step for step in stored.checkpoints if step <= rows[-1])]

    def after(step: int) -> int:
        return next((row for row in rows if row > step), step)

    def before(step: int) -> int:
        return max(start for start in starts if start <= step)

    if steps is not None:
        first, colon, last = steps.partition(":")
        ends = [first or "0", (last or str(rows[-1])) if colon else first]
        if not all(end.isdecimal() and len(end) < 16 for end in ends) or int(ends[0]) > int(ends[1]):
            text = "--steps {steps}: expected two steps, such as 400:500."
            raise RecipeError("audit-steps", text, steps=steps)
        return [(before(int(ends[0])), min(int(ends[1]), rows[-1]))]
    asked = [(start, after(start)) for start in starts]
    if every is not None:
        marks = [mark for mark in recipe.clock.marks(every) if mark <= rows[-1]]
        asked = [(before(mark - 1), after(mark - 1)) for mark in marks]
    joined: list[tuple[int, int]] = []
    for low, high in sorted(set(asked)):
        if joined and low < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return joined


class _Replay:
    """Steps of a run, computed again. *Fields:* `head`, what computes them; `exact`, whether their bits can
    be the run's; the number of `rows` compared."""

    def __init__(self, stored: StoredRun, ledger: StoredLedger, session: Session):
        self.run, self.ledger, self.session, self.rows = stored.path, ledger, session, 0
        self.head = json.loads(json.dumps(head_of(session), default=str))
        bits = [
            [h["computed"].get(n) for n in ("chip", "layout", "devices")] for h in (*ledger.heads, self.head)
        ]
        self.exact = all(one == bits[-1] for one in bits)
        self._metrics: dict[int, dict[str, float]] = {}
        for row in stored.rows:
            self._metrics.setdefault(row["step"], {}).update(metrics_of(row))
        session.watched = ledger.rows

    def begun(self, step: int) -> Fact | None:
        """Takes the state of `step`. *Returns* what is wrong with it."""
        state = None
        try:
            if step:
                state = state_of(self.run, self.session.holding, step)
        except ChipwiseError:
            raise
        except Exception as error:  # Orbax raises many types for damaged bytes
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
            return fact("audit-damaged", step=step, run=str(self.run), reason=reason)
        self.session.begin(state)
        return self._compared(step) if step else None

    def followed(self, high: int) -> Fact | None:
        """Makes steps until `high`. *Returns* the first difference."""
        while self.session.step < high:
            self.session.advance()
            step = self.session.step
            if (found := self._compared(step) or self._compared_metrics(step)) is not None:
                return found
        return None

    def _compared(self, step: int) -> Fact | None:
        """The difference of a row of the ledger from the state."""
        if step not in self.ledger.rows or not self.exact:
            return None
        made, there = self.session.programs.digests.read(self.session.digest()).values, self.ledger.rows[step]
        self.rows += 1
        return self._found(step, [n for n in DIGESTS if n in there and n in made and there[n] != made[n]])

    def _compared_metrics(self, step: int) -> Fact | None:
        """The difference of a row of metrics.jsonl from this step's."""
        session, there, made = self.session, self._metrics.get(step, {}), {}
        if any(name.startswith("train/") for name in there):
            sums = {n: s for n, s in jax.device_get(session.drain()).items() if np.all(s.count)}
            made = {f"train/{name}": value for name, value in finished(sums).items()}
        if any(name.startswith("eval/") for name in there) and session.recipe.task.eval is not None:
            made |= {f"eval/{name}": value for name, value in session.evaluate().items()}
        self.rows += bool(made) and not self.exact
        apart = 0.0 if self.exact else APART

        def differs(name: str) -> bool:
            value = made.get(name, there[name])
            return not math.isclose(value, there[name], rel_tol=apart, abs_tol=apart)

        return self._found(step, [name for name in there if differs(name)])

    def _found(self, step: int, what: list[str]) -> Fact | None:
        if not what:
            return None
        changed = difference(self.ledger.head(step)["computed"], self.head["computed"])
        before = max((row for row in self.ledger.rows if row < step), default=0)
        why = fact("audit-changed", " ({changed:changes})", changed=changed) if changed else ""
        facts = {"run": str(self.run), "step": step, "before": before, "what": what, "why": why}
        return fact("audit-differs", **facts)
