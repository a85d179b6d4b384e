"""`audit` computes parts of a run again, and compares them with its ledger and its rows bit by
bit."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..base import ChipwiseError, Fact, RecipeError, RunError, Say, fact, plain, silent
from ..base.annotations import as_annotated
from ..base.figures import one_line
from ..base.files import read_inside
from ..base.json_types import as_stored
from ..base.locks import NAMES as LOCKS
from ..data.compared import changed_data, uncompared
from ..machine.arithmetic import fixed
from ..machine.kernels import FILE as KERNELS
from ..recipe.recipe import Recipe, difference
from ..recipe.task import finished
from ..run.folder.checkpoint import damage, restore_run, state_of
from ..run.folder.early_stopping import FOLDER
from ..run.folder.ledger import head_of
from ..run.folder.run_folder import recorded
from ..run.folder.run_reader import (
    BESIDE,
    DIGESTS,
    LEDGER,
    StoredLedger,
    StoredRun,
    disagreement,
    holes,
    read_ledger,
    read_run,
    settings_in,
    sha_of,
    steps_in,
)
from ..run.on import ALL, On
from ..run.session import Session
from ..run.tune import take
from ..step.state import fingerprint, parameters
from .stated import METRICS, Rows, equal, one_rule, result_unlike

FILE = "audit.json"
SCHEMA = "chipwise.audit/1"
APART = 0.02
"""The relative difference of a metric up to which another kind of chip may have computed it. Over
the few steps of an interval, the products' precision moves a loss by less."""


@as_annotated
@fixed()
def audit(
    run: str | Path,
    recipe: Recipe,
    *,
    steps: str | None = None,
    every: str | None = None,
    on: On = ALL,
    say: Say = silent,
) -> tuple[Fact, dict[str, Any]]:
    """Computes parts of a run again, from the checkpoint before each, and compares them with its
    ledger, metrics, checkpoints, best checkpoint and result. Writes nothing.

    *Arguments:*

    - `recipe`: the run's recipe.
    - `steps`: the steps to compute again, such as `"4000:4100"`, or `"0:"` for all.
    - `every`: a duration. Each such stretch of the run has one interval, up to the next row. By
      default there is one interval at the beginning and one after each checkpoint.
    - `say`: called before each interval.

    *Returns* the verdict, and a statement that others can check, as JSON values:

    - `passed`: whether nothing differs.
    - `recipe`, `data` and `ledger`: their digests.
    - `computed`: the code and machine of the audit.
    - `same_bits`: whether bits were compared, which needs the run's kind of chip. Otherwise metrics
      are compared within `APART`.
    - `made`: the intervals (after, to) that were computed again.
    - `steps` and `rows`: the number of steps in them, and of rows that were compared there.
    - `found`: everything that differs from the run folder. The first row that differs comes first.
    - `unaudited`: the contents of the run folder that were not computed again.
    - `digest`: the statement's own SHA-256.

    Raises `RunError` for a folder without run or ledger, and `RecipeError` for `steps` out of
    range.
    """
    stored = read_run(run)
    ledger = read_ledger(stored.path)
    if ledger is None or not ledger.rows:
        text = (
            "{run} has no ledger.jsonl with a row: it was trained by an older version, or "
            "only began."
        )
        raise RunError("run-without-ledger", text, run=str(run))
    with Session(recipe, on) as session:
        unlike = _kernels(stored.path, ledger, session)
        replay, made, found = (
            _Replay(stored, ledger, session),
            list[tuple[int, int]](),
            list[Fact](),
        )
        for low, high in _intervals(ledger, stored, recipe, steps, every):
            say(fact("audit-interval", "steps {low} to {high}", low=low, high=high))
            made.append((low, high))
            if (differs := replay.begun(low) or replay.followed(high)) is not None:
                found.append(differs)
                break
        if not found:
            found += replay.kept()
        head = replay.head
        found += [*_changes(stored, ledger, recipe, head), *unlike]
    facts = {"run": str(run), "rows": replay.rows, "steps": sum(b - a for a, b in made)}
    text = (
        "{run} is what its recipe and data make: {rows:count row} of {steps:count step} to the bit."
    )
    if not replay.exact:
        text = (
            "Another kind of chip than that of {run} has other bits: metrics of "
            "{steps:count step} agree."
        )
    verdict = found[0] if found else fact("audit-passed", text, **facts)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    statement = {
        "schema": SCHEMA,
        "time": now,
        "passed": not found,
        "verdict": verdict,
        "found": found,
    }
    statement |= {
        "unaudited": _unaudited(replay, made),
        **head,
        **facts,
        "ledger": ledger.digest,
        "same_bits": replay.exact,
        "made": made,
    }
    document = as_stored(plain(statement), str)
    return verdict, {**document, "digest": sha_of(document)}


def _changes(
    stored: StoredRun, ledger: StoredLedger, recipe: Recipe, head: dict[str, Any]
) -> Iterator[Fact]:
    """The differences from the run's own account of its recipe, data, ledger and length."""
    run = str(stored.path)
    if changed := disagreement(stored.recipe, recorded(recipe)):
        yield fact(
            "audit-other-recipe",
            "The recipe is not {run}'s: {changed:changes}.",
            run=run,
            changed=changed,
        )
    others = dict(
        one for before in ledger.heads for one in changed_data(before["data"], head["data"])
    )
    for name, what in others.items():
        yield fact("audit-other-data", name=name, run=run, what=what)
    if stored.result is not None and not ledger.was(stored.result.get("ledger")):
        yield fact("audit-other-ledger", run=run)
    yield from stored.problems
    yield from holes(stored.path, ledger)
    total = recipe.clock.total or 0
    steps = {
        "metrics.jsonl": [row["step"] for row in stored.rows],
        LEDGER: ledger.rows,
        "checkpoints/": stored.checkpoints,
    }
    for file, there in steps.items():
        if (last := max(there, default=0)) > total:
            yield fact("audit-beyond", run=run, file=file, step=last, total=total)


def _kernels(run: Path, ledger: StoredLedger, session: Session) -> list[Fact]:
    """Loads the tuned kernels that the ledger's last head states for this chip, if it states some.
    *Returns* the difference of the run folder's file from them."""
    computed, file = ledger.heads[-1]["computed"], run / KERNELS
    if (stated := computed.get("kernels")) is None:
        return []
    try:
        digest = hashlib.sha256(read_inside(file)).hexdigest()
    except OSError:
        digest = "missing"
    if digest != stated:
        return [fact("audit-other-kernels", run=str(run), stated=stated, found=digest)]
    if session.machine.chip == computed.get("chip"):
        session.programs.kernels = take(file, session.programs)
    return []


def _unaudited(replay: _Replay, made: list[tuple[int, int]]) -> list[str]:
    """The contents of the run folder that were not computed again."""
    stored, rows, ledger = replay.stored, replay.stated, replay.ledger
    given = recorded(replay.session.recipe)
    earlier = {"packs"} - stored.recipe.keys()  # which earlier versions do not store
    beside = [n for n in BESIDE if n not in earlier and stored.recipe.get(n) != given.get(n)]
    names = [f"recipe.json: {n}" for n in beside]
    names += [f"metrics.jsonl: {', '.join(rows.columns)}"] if rows.columns else []
    again = {step for low, high in made for step in ledger.rows if low < step <= high}
    measured = {step for step in rows.at if any(rows.has(step, part) for part in METRICS)}
    for file, what, steps in (
        ("metrics.jsonl", "", rows.at.keys() - replay.seen),
        ("metrics.jsonl", " without a row", again - measured),
        (LEDGER, "", ledger.rows.keys() - replay.compared),
        (LEDGER, " without a row", measured - ledger.rows.keys()),
    ):
        if steps:
            names.append(f"{file}: {len(steps)} steps{what}, the first is {min(steps)}")
    recipes = sha_of(settings_in(stored.recipe))
    for head in ledger.heads:
        unlike = [name for name, *_ in difference(head["computed"], replay.head["computed"])]
        unlike += uncompared(head["data"], replay.head["data"])
        unlike += ["recipe"] * (head.get("recipe") not in (recipes, replay.head["recipe"]))
        unlike += ["from"] * (head["from"] > 0)
        if unlike:
            names.append(f"{LEDGER}: {', '.join(unlike)} of the head from step {head['from']}")
    for part in METRICS:
        known = part == "train/" or replay.session.recipe.task.eval is not None
        if known and not any(rows.has(step, part) for step in rows.at):
            names.append(f"metrics.jsonl: no row has {part}")
    last, total = max(ledger.rows), replay.session.total
    if stored.result is None and last < total:
        names.append(f"what follows step {last} of {total}: the run is not finished")
    if not replay.ended:
        names.append(
            "result.json" if stored.result is not None else "the end of the run: no result.json"
        )
    audited = {"recipe", "steps", "metrics", "ledger"}
    audited |= {"fingerprint"} if replay.exact else set()
    audited |= {"best"} if one_rule(stored) else set()
    if replay.ended and (others := [name for name in stored.result or () if name not in audited]):
        names.append(f"result.json: {', '.join(others)}")
    stated = stored.kept is not None and stored.kept.value is not None
    if (steps_in(stored.path / FOLDER) or stated) and not replay.best:
        names.append(f"{FOLDER}/")
    there = replay.ended.union(stored.checkpoints)
    names += [f"checkpoints/{step}" for step in sorted(there - replay.checkpoints)]
    if stored.checkpoints:
        sums = "" if replay.sums.keys() >= {*stored.checkpoints} else ", metrics so far"
        names.append(f"checkpoints: seconds, verified{sums}")
    tuned = {KERNELS for head in ledger.heads if "kernels" in head["computed"]}
    names += sorted({file.name for file in stored.path.iterdir()} - KNOWN - tuned)
    return [one_line(name, 1 << 16) for name in names]


def _intervals(
    ledger: StoredLedger, stored: StoredRun, recipe: Recipe, steps: str | None, every: str | None
) -> list[tuple[int, int]]:
    """The intervals (after, to) to compute again, apart from each other and in order."""
    total = recipe.clock.total or 0
    rows = sorted(row for row in ledger.rows if row <= total) or [0]
    starts = [0, *(step for step in stored.checkpoints if step <= total)]
    end = max(rows[-1], *starts)

    def after(step: int) -> int:
        return next((row for row in rows if row > step), step)

    def before(step: int) -> int:
        return max(start for start in starts if start <= step)

    if steps is not None:
        first, colon, last = steps.partition(":")
        ends = [first or "0", (last or str(end)) if colon else first]
        sound = all(one.isdecimal() and len(one) < 16 for one in ends)
        # One step alone is computed from the state before it
        low, high = (int(ends[0]) - (not colon), min(int(ends[1]), end)) if sound else (0, 0)
        if not 0 <= low < high:
            text = (
                "--steps {steps}: expected two steps, such as 400:500, the first below {end}, "
                "the last step of the run."
            )
            raise RecipeError("audit-steps", text, steps=steps, end=end)
        return [(before(low), high)]
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


KNOWN = {"recipe.json", "metrics.jsonl", LEDGER, "result.json", "checkpoints", FOLDER, FILE, *LOCKS}
"""The files in a run folder that an audit compares, its own answer, and locks."""


class _Replay:
    """Steps of a run, computed again.

    *Fields:*

    - `head`: the code, data and machine that compute them.
    - `exact`: whether their bits can be the run's.
    - `rows`: the number of rows compared.
    - `compared`: the steps whose rows of the ledger were compared whole.
    - `passed`: the digests of states that were computed at the step of a checkpoint.
    - `sums`: the metric sums of these states.
    - `seen`: the steps whose metrics were compared.
    - `checkpoints`: the steps whose checkpoints were compared.
    - `ended`: the step with which result.json was compared, if it was.
    - `best`: whether the best checkpoint was compared.
    """

    def __init__(self, stored: StoredRun, ledger: StoredLedger, session: Session):
        self.run, self.ledger, self.session, self.rows = stored.path, ledger, session, 0
        self.stored, self.stated = stored, Rows(stored, session.recipe)
        self.seen, self.checkpoints, self.compared, self.ended = (set[int]() for _ in range(4))
        kept = [*stored.checkpoints, *steps_in(self.run / FOLDER)]
        self.passed: dict[int, dict[str, str] | None] = dict.fromkeys(kept)
        self.sums: dict[int, list[bytes]] = {}
        self.best = False
        self.head = as_stored(head_of(session), str)
        bits = [
            [h["computed"].get(n) for n in ("chip", "layout", "devices", "kernels")]
            for h in (*ledger.heads, self.head)
        ]
        self.exact = all(one == bits[-1] for one in bits)
        session.watched = ledger.rows

    def begun(self, step: int) -> Fact | None:
        """Restores the state of `step`. *Returns* the first difference, or the damage."""
        state = None
        try:
            if step:
                state = state_of(self.run, self.session.state_layout, step)
        except ChipwiseError:
            raise
        except Exception as error:  # Orbax raises many types for damaged bytes
            return fact("audit-damaged", step=step, run=str(self.run), reason=damage(error))
        self.session.begin(state)
        self.begin = step
        if not step:
            return None
        own = self._sums()
        unlike = ["metrics so far"] * (self.sums.get(step, own) != own)
        return (
            self._compared(step)
            or self._found(step, unlike)
            or self._metrics(step, ("eval/",))
            or self._ended(step)
        )

    def followed(self, high: int) -> Fact | None:
        """Trains until step `high`. *Returns* the first difference."""
        while self.session.step < high:
            self.session.advance()
            step = self.session.step
            found = self._compared(step, whole=True) or self._metrics(step) or self._ended(step)
            if found is not None:
                return found
            if self.exact and step in self.passed:
                self.sums[step] = self._sums()
        return None

    def kept(self) -> Iterator[Fact]:
        """Yields the differences of the checkpoints that no interval began with, and of the best
        one."""
        for step in self.stored.checkpoints:
            if step not in self.checkpoints and (found := self.begun(step)) is not None:
                yield found
        if self.exact and steps_in(self.run / FOLDER) and (found := self._best()) is not None:
            yield found

    def _best(self) -> Fact | None:
        """The difference of the best checkpoint from the ledger, or from the computed state, and
        from the run's record of it."""
        kept, recipe = self.stored.kept, self.session.recipe
        try:  # in place of a damaged one comes that of another step, or an error
            state = restore_run(recipe, self.run, lambda damage: None, best=True).whole
        except ChipwiseError as error:
            if error.code == "checkpoint-closed":
                raise
            return fact("audit-best", run=str(self.run), step=None, what=[error.code])
        step = int(state.step)
        self.session.begin(state)
        unlike = self._unlike(step, self._digests())
        self.best = kept is not None and unlike is not None
        unlike = [*(unlike or ()), *["step"] * (kept is not None and kept.step != step)]
        if kept is not None and not unlike:
            value = self._evaluated().get(kept.metric)
            unlike += [] if equal(kept.value, value, 0.0) else [kept.metric]
        facts = {"run": str(self.run), "step": step, "what": unlike}
        return fact("audit-best", **facts) if unlike else None

    def _ended(self, step: int) -> Fact | None:
        """The difference of result.json from the state after the last step, if that is `step`."""
        result, session = self.stored.result, self.session
        early = (
            isinstance(kept := (result or {}).get("best"), dict) and kept.get("ended_early") is True
        )
        end = max(self.stored.checkpoints, default=session.total) if early else session.total
        if result is None or self.ended or step != end:
            return None
        self.ended.add(step)
        state, apart = session.snapshot(), 0.0 if self.exact else APART
        made = fingerprint(parameters(session.recipe, state)) if self.exact else None
        # A run that ended early may have no row of its last steps
        trained = {} if self.stated.has(step, "train/") else self._trained(keep=True)
        values = trained | self._evaluated()
        found = list(result_unlike(self.stored, self.stated, step, made, values, apart))
        facts = {"run": str(self.run), "step": step, "what": found}
        return fact("audit-result", **facts) if found else None

    def _digests(self) -> dict[str, str]:
        return self.session.programs.digests.read(self.session.digest()).values

    def _compared(self, step: int, whole: bool = False) -> Fact | None:
        """The difference of a row of the ledger from the state. A state that was restored is also
        compared with the computed one. One that was computed is compared as a `whole`, with the
        gradient."""
        if not self.exact or (step not in self.ledger.rows and step not in self.passed):
            return None
        made = self._digests()
        unlike = self._unlike(step, made, whole)
        if whole and step in self.passed:
            self.passed[step] = made
        if unlike is None:
            return None
        self.rows += step in self.ledger.rows
        self.checkpoints.add(self.begin)  # a false one would have led elsewhere
        if whole:
            self.compared.add(step)
        return self._found(step, unlike)

    def _unlike(self, step: int, made: dict[str, str], whole: bool = False) -> list[str] | None:
        """The digests of a state that are missing in the ledger's row of `step`, or differ from it.
        `None` if nothing is known of that step."""
        there = self.ledger.rows.get(step, self.passed.get(step))
        if there is None:
            return None
        return [name for name in (DIGESTS if whole else made) if there.get(name) != made.get(name)]

    def _sums(self) -> list[bytes]:
        """The metric sums of the steps since the last row."""
        return [np.asarray(sum).tobytes() for sum in jax.tree.leaves(self.session.drain(True))]

    def _trained(self, keep: bool = False) -> dict[str, Any]:
        """The metrics of training since the last row."""
        sums = jax.device_get(self.session.drain(keep))
        made = finished({name: sum for name, sum in sums.items() if np.all(sum.count)})
        return {f"train/{name}": value for name, value in made.items()}

    def _evaluated(self) -> dict[str, Any]:
        """The metrics of evaluation, none without evaluation data."""
        values = {} if self.session.recipe.task.eval is None else self.session.evaluate()
        return {f"eval/{name}": value for name, value in values.items()}

    def _metrics(self, step: int, parts: tuple[str, ...] = METRICS) -> Fact | None:
        """The difference of a row of metrics.jsonl from this step's. *Arguments:* `parts`: those to
        compare. Those of training need all steps since the row before."""
        asked = [part for part in METRICS if self.stated.has(step, part)]
        wanted = [part for part in asked if part in parts]
        made = self._trained() if "train/" in wanted else {}
        made |= self._evaluated() if "eval/" in wanted else {}
        self.rows += bool(made) and not self.exact
        if wanted == asked:
            self.seen.add(step)
        apart = 0.0 if self.exact else APART
        return self._found(step, self.stated.unlike(step, made, tuple(wanted), apart))

    def _found(self, step: int, what: list[str]) -> Fact | None:
        if not what:
            return None
        changed = difference(self.ledger.head(step)["computed"], self.head["computed"])
        before = max((row for row in self.ledger.rows if row < step), default=0)
        why = fact("audit-changed", " ({changed:changes})", changed=changed) if changed else ""
        facts = {"run": str(self.run), "step": step, "before": before, "what": what, "why": why}
        return fact("audit-differs", **facts)
