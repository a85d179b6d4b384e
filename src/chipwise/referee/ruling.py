"""`referee`: what a change really did. Pairs of runs that share a seed, by turns, until it is known."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..atomic import to_write
from ..engine.signals import StopRequest
from ..errors import RecipeError, RunError, Stopped, invalid, unknown
from ..machine.compilation_cache import compiled_once
from ..machine.hosts import hosts
from ..recipe.metrics import lower_is_better
from ..recipe.recipe import Recipe
from ..study.study_file import Run
from ..study.study_runs import StudyRun, options_of
from ..words.facts import Fact, fact, plain
from .contender import Contender
from .sequential import interval, pairs_needed
from .tries import KEY, Tries

FIRST = ("eval/accuracy", "eval/loss", "train/loss")
"""What is compared if no metric is named: the first that both sides have."""

SAME_SPEED = math.log(1.03)
"""The logarithm of the ratio within which two speeds are called equal: below it, a machine's own noise."""


@dataclass(frozen=True)
class Ruling:
    """What a change did.

    *Fields:* `verdict`: "same" (the programs and inputs are equal, or all bits of the runs and the speed),
    "faster" or "slower" (only that: the bits are the same), "better", "worse", "equal" (within `margin`) or
    "open" (not shown). `base`, `change`: the names of both; `metric`; `margin`, in the metric's unit;
    `values`: of each pair (base, change) in the order of the seeds; `difference`: the mean of change minus
    base, with `low` and `high` that hold the true one at all times but for a probability of `level`; `speed`:
    change over base as (ratio, low, high), of pairs that ran by turns in this call; `needed`: the pairs that
    it probably takes, of an open one; `predicted`: what the first two pairs predicted; `seconds` spent;
    `diverged`: whether the change diverged, where the base did not; `digests` of both; `tries`: the book.
    """

    verdict: str
    base: str
    change: str
    metric: str | None = None
    margin: float | None = None
    values: list[tuple[float, float]] = field(default_factory=list)
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    level: float | None = None
    speed: tuple[float, float | None, float | None] | None = None
    needed: int | None = None
    predicted: int | None = None
    seconds: float = 0.0
    diverged: bool = False
    digests: tuple[str, str] = ("", "")
    tries: Fact | None = None

    @property
    def fact(self) -> Fact:
        """The verdict as one sentence."""
        about = {k: v for k, v in vars(self).items() if k not in ("values", "tries", "digests")}
        kind = "diverged" if self.diverged else self.verdict
        kind += "-unknown" * (kind == "open" and self.needed is None)
        return fact(f"referee-{kind}", **{**about, "pairs": len(self.values)})

    def to_json(self) -> dict[str, Any]:
        tries = None if self.tries is None else self.tries.json()
        about = {**vars(self), "tries": tries, "pairs": len(self.values), "said": self.fact.json()}
        return {"schema": "chipwise.referee/1", **plain(about)}


def referee(
    base: str | Recipe,
    change: str | Recipe | None = None,
    *,
    set: Sequence[str] = (),
    set_base: Sequence[str] = (),
    metric: str | None = None,
    margin: float | str | None = None,
    spend: float = 1800.0,
    error: float = 0.05,
    data: str | None = None,
    run: str | Path = "runs/referee",
    progress: str = "none",
    say: Callable[[Fact], None] = lambda _: None,
    **options: Any,
) -> Ruling:
    """Compares two recipes until it is known which is better, and stops as soon as it is.

        verdict = cw.referee.referee("base.py:recipe", "changed.py:recipe", spend=600)

    Equal programs, data and starts are told at once. Otherwise both are trained with seed 0, then both with
    seed 1, and so on, by turns. After each pair the interval of `sequential.interval` is looked at: it errs
    with a probability of at most its level, however often one looks, and the levels of all tries in `run`
    together hold `error` (`tries`). It supposes that differences of pairs are about normal.

    *Arguments:*

    - `base`, `change`: a `Recipe`, a built-in name, `path.py:name`, or `REVISION:path.py:name` of git; the
      change is by default the base with the settings `set`. `set_base`: settings of both then, else of base.
    - `metric`, such as `"eval/accuracy"`; `margin`: a difference that does not matter, in the metric's unit,
      or `"0.1%"` of the base's mean.
    - `spend`: seconds after which no further pair begins; `error` over all tries of `run`.
    - `data`: as in `cw.load`; `run`: the folder of runs, which later tries share, and of `tries.jsonl`.
    - `progress`, `options`: of each run, as in `cw.fit`.

    *Returns* the `Ruling`. Raises `RecipeError` for sides of other evaluation data, metrics or revisions;
    `RunError` if the base diverges; `Stopped` after SIGTERM or Ctrl-C; the same call then goes on.
    """
    if not 0 < error < 1:
        raise invalid("referee-error", "error", error, "a probability, such as 0.05")
    folder, options = Path(to_write(run, "run")).absolute(), options_of(options)
    hosts().alone("referee")
    both = (base, base if change is None else change)
    settings = (tuple(set_base), (*(set_base if change is None else ()), *set))
    began = time.monotonic()
    sides = [Contender.of(r, s, data, folder / "revisions") for r, s in zip(both, settings, strict=True)]
    found = [side.identity(0, options["on"]) for side in sides]
    (first, inputs), (second, others) = found
    if inputs["evaluation"] != others["evaluation"]:
        text = "{change} is evaluated on other data than {base}: only numbers of the same examples compare."
        raise RecipeError("referee-other-data", text, base=sides[0].name, change=sides[1].name)
    names: dict[str, Any] = {"base": sides[0].name, "change": sides[1].name, "digests": (first, second)}
    with contextlib.closing(Tries(folder, error)) as tries:
        if first == second and None not in (inputs["training"], inputs["evaluation"]):
            verdict = Ruling("same", **names, seconds=time.monotonic() - began)
        else:
            until = began + spend
            match = _Match(sides, names, folder, options, progress, say, tries, metric, margin, until)
            verdict = match.play()
        numbers = ("metric", "difference", "low", "high", "level", "seconds")
        row = {"base": first, "change": second, "margin": margin, **{n: getattr(verdict, n) for n in numbers}}
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        named = {"names": [side.name for side in sides], "when": when}
        tries.write({**row, **named, "verdict": verdict.verdict, "pairs": len(verdict.values)})
    return Ruling(**{**vars(verdict), "tries": tries.summary()})


@dataclass
class _Match:
    """The pairs of two sides. *Fields:* `names`, of a `Ruling`; `until`: when no further pair begins, by
    `time.monotonic()`; `margin`, as it was given; `pairs` of finished runs; `speeds`: logarithms of change
    over base, of pairs whose runs were both trained now; the others as the arguments of `referee`."""

    sides: list[Contender]
    names: dict[str, Any]
    folder: Path
    options: dict[str, Any]
    progress: str
    say: Callable[[Fact], None]
    tries: Tries
    metric: str | None
    margin: float | str | None
    until: float
    pairs: list[tuple[Run, Run]] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    predicted: int | None = None
    began: float = field(default_factory=time.monotonic)

    def play(self) -> Ruling:
        size, longest = _size(self.margin), 0.0
        with contextlib.closing(StopRequest()) as stop, compiled_once():
            for seed in itertools.count():
                at = time.monotonic()
                if (loser := self._pair(seed, stop)) is not None:
                    return loser
                longest = max(longest, time.monotonic() - at)
                now = self._now(size)
                if now.verdict != "open":
                    break
                if seed == 1:
                    self.predicted = now.needed
                    each = (time.monotonic() - self.began) / 2
                    known = {"pairs": now.needed, "seconds": now.needed and each * now.needed}
                    self.say(fact("referee-cost" if now.needed else "referee-cost-unknown", **known))
                late = time.monotonic() + longest > self.until
                if late and not all(self._job(i, seed + 1).finished() for i in (0, 1)):
                    break
        return now

    def _job(self, side: int, seed: int) -> StudyRun:
        return StudyRun({}, seed, self.folder / self.names["digests"][side][:12] / f"seed-{seed}")

    def _pair(self, seed: int, stop: StopRequest) -> Ruling | None:
        """Trains what is missing of a pair, by turns. *Returns* a verdict if the change diverges."""
        runs: dict[int, Run] = {}
        trained = 0
        for i in (0, 1) if seed % 2 == 0 else (1, 0):
            job = self._job(i, seed)
            run = job.finished()
            if run is None:
                job.folder.parent.mkdir(exist_ok=True)
                with self.sides[i].imported():
                    run = job.ended(job.train(self.sides[i].origin, self.options, self.progress))
                trained += 1
            if stop:
                raise Stopped("referee-stopped", signal=stop.name, pairs=len(self.pairs), folder=self.folder)
            runs[i] = run
        if runs[0].diverged:
            text = "{base} diverges with seed {seed}: nothing can be compared with it; try a lower rate."
            raise RunError("referee-base-diverged", text, base=self.sides[0].name, seed=seed)
        if runs[1].diverged:
            return Ruling("worse", **self.names, diverged=True, seconds=time.monotonic() - self.began)
        self.pairs.append((runs[0], runs[1]))
        a, b = (one.examples_per_second for one in self.pairs[-1])
        if trained == 2 and a and b:
            self.speeds.append(math.log(b / a))
        about = {"seed": seed, "base": self.sides[0].name, "change": self.sides[1].name}
        self.say(fact("referee-pair", **about, seconds=time.monotonic() - self.began))
        return None

    def _now(self, size: tuple[float, bool] | None) -> Ruling:
        """What is known after the pairs so far. *Arguments:* `size` of the margin."""
        a, b = (run.metrics for run in self.pairs[-1])
        metric = self.metric = self.metric or next(name for name in FIRST if name in a and name in b)
        for metrics in (a, b):
            if metric not in metrics:
                raise unknown("referee-metric", "metric of both", metric, sorted(metrics))
        values = [(float(a.metrics[metric]), float(b.metrics[metric])) for a, b in self.pairs]
        differences = [b - a for a, b in values]
        room = None
        if size is not None:
            room = size[0] * (abs(statistics.fmean(a for a, _ in values)) if size[1] else 1)
        asked = (*self.names["digests"], metric, self.margin)
        level = self.tries.level(dict(zip(KEY, asked, strict=True)))
        steps = itertools.pairwise(sorted(x for pair in values for x in pair))
        alike = len({round(d, 12) for d in differences}) < len(differences)  # an accuracy has few values
        grain = min((b - a for a, b in steps if alike and b - a > 1e-12), default=0.0)
        low, high = interval(differences, level, grain)
        slow, fast = interval(self.speeds, level)
        same_bits = all(a.fingerprint == b.fingerprint for a, b in self.pairs) and not any(differences)
        kind = "open"
        if same_bits:
            if slow > 0 or fast < 0:
                kind = "faster" if slow > 0 else "slower"
            elif max(abs(slow), abs(fast)) <= SAME_SPEED:
                kind = "same"
        elif room is not None and max(abs(low), abs(high)) <= room:
            kind = "equal"
        elif low > 0 or high < 0:
            kind = "worse" if (high < 0) != lower_is_better(metric) else "better"
        bounds: dict[str, Any] = {"low": low, "high": high} if math.isfinite(high) and not same_bits else {}
        speed = None
        if self.speeds:
            ends = [math.exp(x) if math.isfinite(x) else None for x in (slow, fast)]
            speed = (math.exp(statistics.fmean(self.speeds)), ends[0], ends[1])
        return Ruling(
            kind, **self.names, metric=metric, margin=room, values=values,
            difference=statistics.fmean(differences), **bounds, level=level, speed=speed,
            needed=None if same_bits or kind != "open" else pairs_needed(differences, room, level, grain),
            predicted=self.predicted, seconds=time.monotonic() - self.began,
        )  # fmt: skip


def _size(margin: float | str | None) -> tuple[float, bool] | None:
    """A margin's number, and whether it is a share of the base's mean."""
    if margin is None:
        return None
    text = str(margin)
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise invalid(
            "referee-margin", "margin", margin, "a number above 0, or a share of the base's mean, 0.1%"
        )
    return (number / 100, True) if text.endswith("%") else (number, False)
