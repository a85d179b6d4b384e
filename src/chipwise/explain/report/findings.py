"""Findings about a run, with advice: rules with thresholds, each with its figures.

A rule fires if its figure passes its threshold. A finding is not a proof, and its advice is a
command or a setting to try.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...base import Fact, fact, say, texts
from ...base.figures import one_line
from ...base.json_types import part
from ...data.watch import FED
from ...run.folder.run_reader import StoredRun, number
from .time_spent import Interval

WORSE = 1.1  # final evaluation loss over its minimum


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


def slow(run: StoredRun, timed: Sequence[Interval], recipe: str) -> Iterator[Observation]:
    """Reports a wait for data, from the feed's own account, or from the rows of an unfinished run.
    *Arguments:* `recipe`: as typed in a command."""
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
