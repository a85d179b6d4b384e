"""Findings about a run, with advice: rules with thresholds, each with its figures.

A rule fires if its figure passes its threshold. A finding is not a proof, and its advice is a
command or a setting to try.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...base import Fact, fact, say, texts
from ...base.figures import one_line
from ...chips import find
from ...chips.targets import sizes
from ...data.watch import FED
from ...run.folder.run_reader import StoredRun, number
from ..row import part
from .time_spent import Interval, Speed, TimeSpent

WORSE = 1.1  # final evaluation loss over its minimum
SHORT = 60.0  # seconds; in shorter runs shares of wall time say little
LARGE = 0.10  # share of the wall time above which work other than training matters
SMALL = 0.05  # the share to reduce it to
LOW_PEAK = 0.2  # share of the chip's peak


@dataclass(frozen=True)
class Observation:
    """A finding: a fact with its numbers, and advice."""

    about: str
    """"time", "learning" or "settings"."""
    fact: Fact
    tries: Sequence[Fact | str] = ()
    """What to try: facts, or commands to type."""
    also: Sequence[Fact] = ()
    """Further facts."""

    def json(self) -> dict[str, Any]:
        """JSON values: the fact, its `evidence` as text, and the facts `also` and `try`."""
        evidence = [say(self.fact, "evidence")] if "evidence" in texts(self.fact.code) else []
        tries = [
            fact("try-command", command=one) if isinstance(one, str) else one for one in self.tries
        ]
        return {
            "about": self.about,
            **self.fact.json(),
            "evidence": " ".join([*evidence, *map(str, self.also)]),
            "also": [one.json() for one in self.also],
            "try": [one.json() for one in tries],
        }


# ---- learning


def learned(run: StoredRun, finished: bool, lower: str | None, recipe: str) -> list[Observation]:
    """Findings about learning.

    *Arguments:* `lower` is a lower rate to try, such as `lr=0.1`, if known. `recipe` is the recipe
    as typed in a command.
    """
    less = fact("try-lower-rate") if lower is None else f"--set {lower}"
    calmer = (less, "--set clip=1.0", f"chipwise find-lr {recipe}")
    if (diverged := divergence(run)) is not None:
        step, how = diverged
        good = [saved for saved in run.checkpoints if saved < step]
        before = (
            fact("checkpoint-before", step=good[-1]) if good else fact("checkpoint-none-before")
        )
        return [Observation("learning", fact("story-run-diverged"), calmer, (how, before))]
    findings = list(_unlearned(run, calmer, recipe))
    if not findings and finished and run.kept is None:
        findings = list(_earlier_best(run))
    return findings


def divergence(run: StoredRun) -> tuple[int, Fact] | None:
    """The step and the fact of a divergence. Takes the first row that states one, otherwise the
    first row with a loss that is not finite. Returns `None` if there is neither."""
    for row in run.rows:
        stated = row.get("diverged")
        if isinstance(stated, dict) and {"first", "last", "value"} <= set(stated):
            between = {"first": stated["first"], "last": stated["last"]}
            if stated.get("code") == "parameter-not-finite":
                return row["step"], fact("story-diverged-parameter", **between)
            return row["step"], fact(
                "story-diverged-loss", value=one_line(stated["value"]), **between
            )
    for row in run.rows:
        losses = [row[name] for name in ("train/loss", "eval/loss") if name in row]
        if any(x is None or (isinstance(x, float) and not math.isfinite(x)) for x in losses):
            first = max((r["step"] for r in run.rows if r["step"] < row["step"]), default=0) + 1
            return row["step"], fact("story-diverged-some-loss", first=first, last=row["step"])
    return None


def _series(run: StoredRun, name: str) -> list[tuple[int, float]]:
    return [
        (row["step"], value) for row in run.rows if (value := number(row.get(name))) is not None
    ]


def _unlearned(run: StoredRun, calmer: Sequence[Fact | str], recipe: str) -> Iterator[Observation]:
    losses = _series(run, "train/loss")
    if len(losses) < 3:
        return
    (first, start), (last, end) = losses[0], losses[-1]
    lowest = start
    for step, value in losses[1:]:
        if value > 3 * abs(lowest) and value > start:
            jumped = fact("loss-jumped", lowest=lowest, value=value, step=step)
            yield Observation("learning", jumped, calmer)
            return
        lowest = min(lowest, value)
    if end >= 0.98 * start > 0:
        flat = fact("loss-did-not-fall", start=start, first=first, end=end, last=last)
        yield Observation(
            "learning", flat, (f"chipwise find-lr {recipe}", f"chipwise check {recipe}")
        )


def _earlier_best(run: StoredRun) -> Iterator[Observation]:
    losses = _series(run, "eval/loss")
    if len(losses) < 5:
        return
    (best_at, best), (last_at, last) = min(losses, key=lambda pair: pair[1]), losses[-1]
    if sum(step > best_at for step, _ in losses) >= 3 and last > WORSE * best > 0:
        epoch = next((number(row.get("epoch")) for row in run.rows if row["step"] == best_at), None)
        until = f"--set duration={f'{epoch:.3g}ep' if epoch else f'{best_at}st'}"
        lower = fact("loss-lowest-before-the-end", best=best, step=best_at, end=last, last=last_at)
        yield Observation("learning", lower, (fact("try-decay-or-augmentation"), until))


# ---- time


def slow(
    run: StoredRun,
    timed: Sequence[Interval],
    spent: TimeSpent | None,
    speed: Speed | None,
    recipe: str,
) -> Iterator[Observation]:
    """Findings about time, largest cost first. *Arguments:* `recipe`: as typed in a command."""
    yield from _input(run, timed, recipe)
    yield from _sections(run, spent)
    if speed is not None and speed.share_of_peak and speed.share_of_peak < LOW_PEAK:
        precision = run.recipe.get("precision")
        finding = fact("chip-little-used", share=speed.share_of_peak, precision=one_line(precision))
        commands = ["--set precision=bf16"] * (precision == "f32")
        chip = find(str(part(run.result, "devices").get("kind")))
        smallest = [target.name for target in sizes(chip)][:1] if chip else []
        commands += [f"chipwise plan {recipe} --on {target} --largest-batch" for target in smallest]
        yield Observation("time", finding, commands)


def _input(run: StoredRun, timed: Sequence[Interval], recipe: str) -> Iterator[Observation]:
    """Reports a wait for data, from the feed's own account, or from the rows of an unfinished
    run."""
    tries: list[Fact | str] = [f"chipwise bench {recipe} --feed host"]
    feed = part(run.result, "feed")
    also = list[Fact]()
    waited = number(feed.get("waited_seconds"))
    total = number(part(run.result, "seconds").get("train"))
    if (share := number(feed.get("waited_share"))) is not None:
        if isinstance(verdict := feed.get("verdict"), str):
            also.append(fact("feed-verdict", verdict=one_line(verdict)))
        if isinstance(words := part(feed, "advice").get("text"), str):
            tries.insert(0, fact("try-as-told", words=one_line(words)))
    elif total := sum(i.seconds for i in timed):
        waited = sum(i.seconds * (i.waited or 0.0) for i in timed)
        share = waited / total
    if share is not None and share >= FED:
        finding = fact("waited-for-data", waited=waited, seconds=total, share=share)
        yield Observation("time", finding, tries, also)


def _sections(run: StoredRun, spent: TimeSpent | None) -> Iterator[Observation]:
    """Reports evaluating and saving that took a large share of the wall time. Only result.json has
    these times."""
    if spent is None or spent.of != "result.json" or spent.total < SHORT:
        return
    evaluations = [row for row in run.rows if any(name.startswith("eval/") for name in row)]
    shares = {name: seconds / spent.total for name, seconds in spent.parts.items()}
    rarer = _rarer(evaluations, shares.get("evaluate", 0.0))
    rules: dict[str, tuple[str, dict[str, Any], list[Fact | str]]] = {
        "evaluate": ("evaluating-large", {"times": len(evaluations)}, [rarer]),
        "checkpoint": ("saving-large", {}, ["--checkpoint-every 25%", fact("try-faster-disk")]),
    }
    for name, (code, more, tries) in rules.items():
        if (share := shares.get(name, 0.0)) >= LARGE:
            numbers = {"seconds": spent.parts[name], "total": spent.total, "share": share, **more}
            yield Observation("time", Fact(code, numbers), tries)


def _rarer(evaluations: Sequence[Mapping[str, Any]], share: float) -> str:
    epochs = [e for row in evaluations if (e := number(row.get("epoch"))) is not None]
    every = (
        statistics.median(b - a for a, b in itertools.pairwise(epochs)) if len(epochs) > 1 else 0.0
    )
    if every <= 0:
        return "--eval-every end"
    return f"--eval-every {max(every * math.ceil(share / SMALL), 0.001):.3g}ep"
