"""Findings about a run, with advice: rules with thresholds, each with its figures.

A rule fires if its figure passes its threshold. A finding is not a proof, and its advice is a command or a
setting to try.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...chips import find
from ...data.stages import NAMES
from ...data.watch import FED
from ...engine.log import unsettled
from ...engine.stored import StoredRun, number
from ...planner.device_memory import sizes
from ...words.facts import Fact, fact, say, texts
from ...words.figures import one_line
from ..row import part
from .time_spent import Interval, Speed, TimeSpent

WORSE = 1.1  # final evaluation loss over its minimum
GAP = 0.05  # training accuracy minus evaluation accuracy
SHORT = 60.0  # seconds; in shorter runs shares of wall time say little
LARGE = 0.10  # share of the wall time above which work other than training matters
SMALL = 0.05  # the share to reduce it to
LOW_PEAK = 0.2  # share of the chip's peak


@dataclass(frozen=True)
class Observation:
    """A finding: a fact with its numbers, further facts `also`, and what to try: facts, or commands to type.
    `about`: "time", "learning" or "settings"."""

    about: str
    fact: Fact
    tries: Sequence[Fact | str] = ()
    also: Sequence[Fact] = ()

    def json(self) -> dict[str, Any]:
        """JSON values: the fact, its `evidence` as text, and the facts `also` and `try`."""
        evidence = [say(self.fact, "evidence")] if "evidence" in texts(self.fact.code) else []
        tries = [fact("try-command", command=one) if isinstance(one, str) else one for one in self.tries]
        return {
            "about": self.about,
            **self.fact.json(),
            "evidence": " ".join([*evidence, *map(str, self.also)]),
            "also": [one.json() for one in self.also],
            "try": [one.json() for one in tries],
        }


# ---- learning


def learned(run: StoredRun, finished: bool, lower: str | None, recipe: str) -> list[Observation]:
    """Findings about learning. *Arguments:* `lower`: a lower rate to try, such as `lr=0.1`, if known;
    `recipe`: as typed in a command."""
    less = fact("try-lower-rate") if lower is None else f"--set {lower}"
    calmer = (less, "--set clip=1.0", f"chipwise find-lr {recipe}")
    if (diverged := divergence(run)) is not None:
        step, how = diverged
        good = [saved for saved in run.checkpoints if saved < step]
        before = fact("checkpoint-before", step=good[-1]) if good else fact("checkpoint-none-before")
        return [Observation("learning", fact("story-run-diverged"), calmer, (how, before))]
    findings = list(_unlearned(run, calmer, recipe))
    if not findings and finished:
        findings = [*(_earlier_best(run) if run.kept is None else ()), *_gap(run)]
    return findings


def divergence(run: StoredRun) -> tuple[int, Fact] | None:
    """The step of the row with the divergence, and the fact; else of the first row with a loss that is not
    finite; `None` if there is none."""
    for row in run.rows:
        stated = row.get("diverged")
        if isinstance(stated, dict) and {"first", "last", "value"} <= set(stated):
            between = {"first": stated["first"], "last": stated["last"]}
            if stated.get("code") == "parameter-not-finite":
                return row["step"], fact("story-diverged-parameter", **between)
            return row["step"], fact("story-diverged-loss", value=one_line(stated["value"]), **between)
    for row in run.rows:
        losses = [row[name] for name in ("train/loss", "eval/loss") if name in row]
        if any(x is None or (isinstance(x, float) and not math.isfinite(x)) for x in losses):
            first = max((r["step"] for r in run.rows if r["step"] < row["step"]), default=0) + 1
            return row["step"], fact("story-diverged-some-loss", first=first, last=row["step"])
    return None


def _series(run: StoredRun, name: str) -> list[tuple[int, float]]:
    return [(row["step"], value) for row in run.rows if (value := number(row.get(name))) is not None]


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
        yield Observation("learning", flat, (f"chipwise find-lr {recipe}", f"chipwise check {recipe}"))


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


def _gap(run: StoredRun) -> Iterator[Observation]:
    train, held_out = _series(run, "train/accuracy"), _series(run, "eval/accuracy")
    if not train or not held_out:
        return
    a, b = train[-1][1], held_out[-1][1]
    examples = part(part(run.recipe, "task"), "eval").get("examples")
    chance = math.inf  # standard error of an accuracy
    if isinstance(examples, int) and number(examples) is not None and examples > 0 and 0 <= b <= 1:
        chance = math.sqrt(b * (1 - b) / examples)
    if a - b < max(GAP, 2 * chance):
        return
    step, running = run.rows[-1]["step"], part(run.result, "devices").get("task_state")
    if running and unsettled({"train/accuracy": a, "eval/accuracy": b}, step):
        begun = fact("statistics-at-their-start", train=a, eval=b, steps=step)
        longer = [] if run.kept is not None and run.kept.ended_early else [fact("try-longer-run")]
        yield Observation("learning", begun, (*longer, fact("try-lower-momentum")))
        return
    tries = fact("try-decay-or-augmentation"), fact("try-more-examples")
    yield Observation("learning", fact("accuracy-gap", train=a, eval=b), tries)


# ---- time


def slow(
    run: StoredRun, timed: Sequence[Interval], spent: TimeSpent | None, speed: Speed | None, recipe: str
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
    """Waiting for data: by the feed's own account, or by the rows of an unfinished run."""
    tries: list[Fact | str] = [f"chipwise bench {recipe} --feed host"]
    feed, also = part(run.result, "feed"), list[Fact]()
    waited, total = number(feed.get("waited_seconds")), number(part(run.result, "seconds").get("train"))
    if (share := number(feed.get("waited_share"))) is not None:
        if isinstance(verdict := feed.get("verdict"), str):
            also.append(fact("feed-verdict", verdict=one_line(verdict)))
        if isinstance(words := part(feed, "advice").get("text"), str):
            tries.insert(0, fact("try-as-told", words=one_line(words)))
    elif total := sum(i.seconds for i in timed):
        waited = sum(i.seconds * (i.waited or 0.0) for i in timed)
        share = waited / total
        busy = {s: sum(number(row.get(f"feed/{s}_cores")) or 0.0 for row in run.rows) for s in NAMES}
        if any(busy.values()):
            also.append(fact("busiest-stage", stage=max(busy, key=lambda s: busy[s])))
    if share is not None and share >= FED:
        finding = fact("waited-for-data", waited=waited, seconds=total, share=share)
        yield Observation("time", finding, tries, also)


def _sections(run: StoredRun, spent: TimeSpent | None) -> Iterator[Observation]:
    """Work other than training that took a large share of the wall time, known only from result.json."""
    if spent is None or spent.of != "result.json" or spent.total < SHORT:
        return
    evaluations = [row for row in run.rows if any(name.startswith("eval/") for name in row)]
    shares = {name: seconds / spent.total for name, seconds in spent.parts.items()}
    rarer = _rarer(evaluations, shares.get("evaluate", 0.0))
    # If the data is to stay on the device, all of it is read before the first step
    resident = part(run.result, "feed").get("data") == "on the device"
    rules: dict[str, tuple[str, dict[str, Any], list[Fact | str]]] = {
        "start": ("starting-large", {}, ["--feed host"] if resident else []),
        "compile": ("compiling-large", {}, ["export JAX_COMPILATION_CACHE_DIR=~/.cache/jax"]),
        "evaluate": ("evaluating-large", {"times": len(evaluations)}, [rarer]),
        "checkpoint": ("saving-large", {}, ["--checkpoint-every 25%", fact("try-faster-disk")]),
    }
    for name, (code, more, tries) in rules.items():
        if (share := shares.get(name, 0.0)) >= LARGE:
            numbers = {"seconds": spent.parts[name], "total": spent.total, "share": share, **more}
            yield Observation("time", Fact(code, numbers), tries)


def _rarer(evaluations: Sequence[Mapping[str, Any]], share: float) -> str:
    epochs = [e for row in evaluations if (e := number(row.get("epoch"))) is not None]
    every = statistics.median(b - a for a, b in itertools.pairwise(epochs)) if len(epochs) > 1 else 0.0
    if every <= 0:
        return "--eval-every end"
    return f"--eval-every {max(every * math.ceil(share / SMALL), 0.001):.3g}ep"
