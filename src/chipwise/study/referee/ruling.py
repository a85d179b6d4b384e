"""`referee` measures the effect of a change. It trains pairs of runs that share a seed, by turns,
until the effect is known."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...base import Fact, RecipeError, RunError, Say, Stopped, fact, invalid, plain, silent, unknown
from ...base.annotations import as_annotated
from ...base.figures import known
from ...base.files import to_write
from ...data.compared import changed_data, texts
from ...machine.compilation_cache import compiled_once
from ...machine.hosts import hosts
from ...recipe.direction import LOWER, judged
from ...recipe.recipe import Recipe
from ...run.signals import StopRequest
from ..study_file import Run
from ..study_runs import StudyRun, options_of
from .contender import Contender
from .sequential import interval, pairs_needed
from .tries import KEY, Tries

FIRST = ("eval/accuracy", "eval/loss", "train/loss")
"""The metric to compare if none is named: the first that both sides have."""

SAME_SPEED = math.log(1.03)
"""Two speeds count as equal if the logarithm of their ratio is at most this. Smaller differences
are a machine's own noise."""


@dataclass(frozen=True)
class Ruling:
    """The effect of a change."""

    verdict: str
    """One of these verdicts.

    - "same": the programs and inputs are equal, or all bits of the runs and their speed.
    - "faster" or "slower": only the speed differs. The bits are the same.
    - "better" or "worse": the metric differs, or the change diverged ("worse").
    - "equal": the difference is within `margin`.
    - "open": nothing is shown.
    """
    base: str
    change: str
    """`base` and `change` are the names of both sides."""
    metric: str | None = None
    better: str | None = None
    """The better values of the metric, "lower" or "higher"."""
    margin: float | None = None
    """In the metric's unit."""
    values: Sequence[tuple[float | None, float | None]] = field(default_factory=list)
    """The values (base, change) of each pair, in the order of the seeds. Those of unpaired rows
    stand side by side."""
    rows: tuple[int, int] | None = None
    """The numbers of unpaired rows (base, change). `None` for pairs."""
    difference: float | None = None
    """The mean of change minus base."""
    low: float | None = None
    high: float | None = None
    level: float | None = None
    """`low` and `high` enclose the true difference at all times, except with this probability."""
    speed: tuple[float, float | None, float | None] | None = None
    """Change over base as (ratio, low, high), from pairs that ran by turns in this call."""
    needed: int | None = None
    """The number of pairs, or of unpaired rows of each side, that an open verdict probably
    takes."""
    predicted: int | None = None
    """The number of pairs that the first two pairs predicted."""
    seconds: float = 0.0
    """The time spent."""
    diverged: bool = False
    """Whether the change diverged and the base did not."""
    digests: tuple[str, str] = ("", "")
    """The digests of both sides."""
    tries: Fact | None = None
    """The summary of all tries."""

    @property
    def fact(self) -> Fact:
        """The verdict as one sentence."""
        about = {k: v for k, v in vars(self).items() if k not in ("values", "tries", "digests")}
        kind = "diverged" if self.diverged else self.verdict
        if kind == "open" and not self.values:
            kind = "open-untried"
        elif kind == "open" and self.needed is None:
            kind = "open-unknown" if self.rows is None else "open-unknown-rows"
        pairs = len(self.values)
        needed = self.needed
        spent = fact("referee-pairs", "{pairs:count pair}", pairs=pairs)
        takes = needed and fact("referee-takes-pairs", "{pairs:count pair}", pairs=needed)
        if self.rows is not None:
            base, change = self.rows
            spent = fact("referee-rows", "{base} and {change:count run}", base=base, change=change)
            takes = needed and fact("referee-takes-rows", "{rows:count run} of each", rows=needed)
        about |= {"pairs": pairs, "spent": spent, "takes": takes}
        return fact(f"referee-{kind}", **about)

    def entry(self, margin: float | str | None) -> dict[str, Any]:
        """The row of the book of tries."""
        kept = ("metric", "difference", "low", "high", "level", "seconds", "verdict")
        (base, change), names = self.digests, [self.base, self.change]
        return {
            **{name: getattr(self, name) for name in kept},
            **{"base": base, "change": change, "margin": margin, "pairs": len(self.values)},
            **{"names": names, "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
        }

    def to_json(self) -> dict[str, Any]:
        tries = None if self.tries is None else self.tries.json()
        about = {**vars(self), "tries": tries, "pairs": len(self.values), "said": self.fact.json()}
        return {"schema": "chipwise.referee/1", **plain(about)}


@as_annotated
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
    data: str | Path | None = None,
    run: str | Path = "runs/referee",
    progress: str = "none",
    say: Say = silent,
    **options: Any,
) -> Ruling:
    """Compares two recipes until it is known which is better, and stops as soon as it is.

        verdict = cw.referee.referee("base.py:recipe", "changed.py:recipe", spend=600)

    Equal programs, data and starts give the verdict "same" at once. Otherwise both are trained with
    seed 0, then both with seed 1, and so on, by turns. After each pair the function examines the
    interval of `sequential.interval`. The interval errs with a probability of at most its level,
    however often one looks. The levels of all tries in `run` together keep to `error` (`tries`).
    The interval supposes that differences of pairs are about normal.

    *Arguments:*

    - `base`, `change`: a `Recipe`, a built-in name, `path.py:name`, or `REVISION:path.py:name` of
      git. The change is by default the base with the settings `set`.
    - `set`: settings of the change.
    - `set_base`: settings of the base, and of the change too if `change` is not given.
    - `metric`: such as `"eval/accuracy"`.
    - `margin`: a difference that does not matter, in the metric's unit, or `"0.1%"` of the base's
      mean.
    - `spend`: seconds after which no further pair begins.
    - `error`: the highest expected share of wrong verdicts over all tries of `run`.
    - `data`: as in `cw.load`.
    - `run`: the folder of runs and of `tries.jsonl`, which later tries share.
    - `progress`, `options`: of each run, as in `cw.fit`. `better` among them says which way the
      metric is better, if the recipes do not.

    *Returns* the `Ruling`. Raises `RecipeError` for sides with different evaluation data, for a
    metric that a side lacks or of unknown direction, and for an unknown revision. Raises `RunError`
    if the base diverges. Raises `Stopped` after SIGTERM, SIGHUP or Ctrl-C. The same call then
    continues.
    """
    folder, options = Path(to_write(run, "run")).absolute(), options_of(options)
    hosts().alone("referee")
    both = (base, base if change is None else change)
    settings = (tuple(set_base), (*(set_base if change is None else ()), *set))
    began = time.monotonic()
    sides = Contender.each(both, settings, data)
    found = [side.identity(0, options) for side in sides]
    (first, inputs, _), (second, others, _) = found
    if "evaluation" in dict(changed_data(texts(inputs), texts(others))):
        text = (
            "{change} is evaluated on other data than {base}: only numbers of the same "
            "examples compare."
        )
        raise RecipeError("referee-other-data", text, base=sides[0].name, change=sides[1].name)
    directions = {
        name: judged(name, options["better"], *(one[2] for one in found))
        for name in ([metric] if metric else FIRST)
    }
    if metric:
        say(directions[metric])
    names: dict[str, Any] = {
        "base": sides[0].name,
        "change": sides[1].name,
        "digests": (first, second),
    }
    with contextlib.closing(Tries(folder, error)) as tries:
        if first == second and all(one.whole for one in inputs.values()):
            verdict = Ruling("same", **names, seconds=time.monotonic() - began)
        else:
            until = began + spend
            trial = _Trial(
                sides, names, folder, options, progress, say, tries, directions, margin, until
            )
            verdict = trial.run()
        tries.write(verdict.entry(margin))
    return replace(verdict, tries=tries.summary())


@dataclass
class _Trial:
    """The pairs of two sides. Fields without a text are as in `referee`."""

    sides: list[Contender]
    names: dict[str, Any]
    """Those of a `Ruling`."""
    folder: Path
    options: dict[str, Any]
    progress: str
    say: Say
    tries: Tries
    directions: dict[str, Fact]
    """The direction of each metric that may be compared. The first that both sides have is."""
    margin: float | str | None
    """The margin as given."""
    until: float
    """When no further pair begins, by `time.monotonic()`."""
    pairs: list[tuple[Run, Run]] = field(default_factory=list)
    """Pairs of finished runs."""
    speeds: list[float] = field(default_factory=list)
    """Logarithms of change over base, of pairs whose runs were both trained in this call."""
    predicted: int | None = None
    began: float = field(default_factory=time.monotonic)

    def run(self) -> Ruling:
        size, longest = size_of(self.margin), 0.0
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
                    cost = {"pairs": now.needed, "seconds": now.needed and each * now.needed}
                    self.say(fact("referee-cost" if now.needed else "referee-cost-unknown", **cost))
                late = time.monotonic() + longest > self.until
                if late and not all(self._job(i, seed + 1).finished() for i in (0, 1)):
                    break
        return now

    def _job(self, side: int, seed: int) -> StudyRun:
        folder = self.folder / self.names["digests"][side][:12] / f"seed-{seed}"
        return StudyRun({}, seed, folder, {**self.sides[side].settings, "seed": seed})

    def _pair(self, seed: int, stop: StopRequest) -> Ruling | None:
        """Trains the missing runs of a pair, by turns. *Returns* a verdict if the change
        diverges."""
        runs: dict[int, Run] = {}
        trained = 0
        for i in (0, 1) if seed % 2 == 0 else (1, 0):
            job = self._job(i, seed)
            run = job.finished()
            if run is None:
                self.tries.check()
                with self.sides[i].imported():
                    run = job.ended(job.train(self.sides[i].origin, self.options, self.progress))
                trained += 1
            if stop:
                raise Stopped(
                    "referee-stopped", signal=stop.name, pairs=len(self.pairs), folder=self.folder
                )
            runs[i] = run
        if runs[0].diverged:
            text = (
                "{base} diverges with seed {seed}: nothing can be compared with it; try a "
                "lower rate."
            )
            raise RunError("referee-base-diverged", text, base=self.sides[0].name, seed=seed)
        if runs[1].diverged:
            return Ruling(
                "worse", **self.names, diverged=True, seconds=time.monotonic() - self.began
            )
        self.pairs.append((runs[0], runs[1]))
        a, b = (one.examples_per_second for one in self.pairs[-1])
        if trained == 2 and a and b:
            self.speeds.append(math.log(b / a))
        about = {"seed": seed, "base": self.sides[0].name, "change": self.sides[1].name}
        self.say(fact("referee-pair", **about, seconds=time.monotonic() - self.began))
        return None

    def _value(self, metric: str, side: int, run: Run) -> float:
        value = run.metrics[metric]
        if not known(value):
            about = {"side": self.sides[side].name, "seed": run.seed, "metric": metric}
            raise RecipeError("referee-no-number", **about, value=str(value))
        return float(value)

    def _now(self, size: tuple[float, bool] | None) -> Ruling:
        """The ruling after the pairs so far. *Arguments:* `size`: the margin's, from `size_of`."""
        a, b = (run.metrics for run in self.pairs[-1])
        metric = next((name for name in self.directions if name in a and name in b), None)
        if metric is None:
            raise unknown(
                "referee-metric", "metric of both", next(iter(self.directions)), sorted({*a} & {*b})
            )
        better = self.directions[metric]["better"]
        values = [(self._value(metric, 0, a), self._value(metric, 1, b)) for a, b in self.pairs]
        differences = [b - a for a, b in values]
        room = room_of(size, [a for a, _ in values])
        asked = (*self.names["digests"], metric, self.margin)
        level = self.tries.level(dict(zip(KEY, asked, strict=True)))
        grain = grain_of(differences, values)
        low, high = interval(differences, level, grain)
        slow, fast = interval(self.speeds, level)
        same_bits = all(a.fingerprint == b.fingerprint for a, b in self.pairs) and not any(
            differences
        )
        kind = "open"
        if same_bits:
            if slow > 0 or fast < 0:
                kind = "faster" if slow > 0 else "slower"
            elif max(abs(slow), abs(fast)) <= SAME_SPEED:
                kind = "same"
        else:
            kind = called(low, high, room, better)
        bounds: dict[str, Any] = (
            {"low": low, "high": high} if math.isfinite(high) and not same_bits else {}
        )
        speed = None
        if self.speeds:
            ends = [math.exp(x) if math.isfinite(x) else None for x in (slow, fast)]
            speed = (math.exp(statistics.fmean(self.speeds)), ends[0], ends[1])
        return Ruling(
            kind,
            **self.names,
            metric=metric,
            better=better,
            margin=room,
            values=values,
            difference=statistics.fmean(differences),
            **bounds,
            level=level,
            speed=speed,
            needed=None
            if same_bits or kind != "open"
            else pairs_needed(differences, room, level, grain),
            predicted=self.predicted,
            seconds=time.monotonic() - self.began,
        )


def called(low: float, high: float, room: float | None, better: str) -> str:
    """The verdict of an interval. *Arguments:* `room`: the margin, in the metric's unit."""
    if room is not None and max(abs(low), abs(high)) <= room:
        return "equal"
    if low <= 0 <= high:
        return "open"
    return "worse" if (high < 0) != (better == LOWER) else "better"


def grain_of(compared: Sequence[float], values: Sequence[Sequence[float]]) -> float:
    """The smallest step between `values` if some of the `compared` numbers are alike, otherwise 0.
    An accuracy has few values. If all values are alike, any step is possible, and it is
    infinite."""
    if len({round(number, 12) for number in compared}) == len(compared):
        return 0.0
    steps = itertools.pairwise(sorted(itertools.chain(*values)))
    return min((b - a for a, b in steps if b - a > 1e-12), default=math.inf)


def room_of(size: tuple[float, bool] | None, base: Sequence[float]) -> float | None:
    """The margin in the metric's unit. *Arguments:* `size`: from `size_of`."""
    return size and size[0] * (abs(statistics.fmean(base)) if size[1] else 1)


def size_of(margin: float | str | None) -> tuple[float, bool] | None:
    """A margin's number, and whether it is a share of the base's mean."""
    if margin is None:
        return None
    text = str(margin)
    try:
        number = float(text.removesuffix("%")) if text.isascii() else math.nan
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise invalid(
            "referee-margin",
            "margin",
            margin,
            "a number above 0, or a share of the base's mean, 0.1%",
        )
    return (number / 100, True) if text.endswith("%") else (number, False)
