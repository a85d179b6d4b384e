"""Findings about a run, with advice: rules with thresholds, each with its figures.

A rule fires if its figure passes its threshold. A finding is not a proof, and its advice is a command or a
setting to try.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...data.stages import NAMES
from ...data.watch import FED
from ...engine.log import unsettled
from ...engine.stored import StoredRun, number
from ...words.facts import Fact, fact, say, texts
from ...words.figures import one_line
from .time_spent import Interval, Speed, TimeSpent

WORSE = 1.1  # final evaluation loss over its minimum
GAP = 0.05  # training accuracy minus evaluation accuracy
IDLE = 0.10  # share of a run with rate 0
SHORT = 60.0  # seconds; in shorter runs shares of wall time say little
LARGE = 0.10  # share of the wall time above which work other than training matters
SMALL = 0.05  # the share to reduce it to
SLOW = 0.5  # share of the median speed below which an interval is slow
ENOUGH = 6  # least intervals for a spread
NOTABLE = 0.01  # least share of the training time lost to slow intervals
LOW_PEAK = 0.2  # share of the chip's peak


@dataclass(frozen=True)
class Observation:
    """A finding: a fact with its numbers, further facts `also`, and what to try. `about`: "time", "learning"
    or "settings"."""

    about: str
    fact: Fact
    also: Sequence[Fact] = ()
    tries: Sequence[Fact] = ()

    def json(self) -> dict[str, Any]:
        """JSON values: the fact, its `evidence` as text, and the facts `also` and `try`."""
        evidence = [say(self.fact, "evidence")] if "evidence" in texts(self.fact.code) else []
        return {
            "about": self.about,
            **self.fact.json(),
            "evidence": " ".join([*evidence, *map(str, self.also)]),
            "also": [one.json() for one in self.also],
            "try": [one.json() for one in self.tries],
        }


def typed_text(command: str) -> Fact:
    """A command to type, or a part of one."""
    return fact("try-command", command=command)


# ---- learning


def learned(
    run: StoredRun, finished: bool, rate: Mapping[str, Any], lower: str | None, recipe: str
) -> list[Observation]:
    """Findings about learning. *Arguments:* `rate`: from `settings.curve`; `lower`: a lower rate to try, such
    as `lr=0.1`, if known; `recipe`: as typed in a command."""
    calmer = (
        fact("try-lower-rate") if lower is None else typed_text(f"--set {lower}"),
        typed_text("--set clip=1.0"),
        typed_text(f"chipwise find-lr {recipe}"),
    )
    if (diverged := divergence(run)) is not None:
        step, how = diverged
        good = [saved for saved in run.checkpoints if saved < step]
        before = fact("checkpoint-before", step=good[-1]) if good else fact("checkpoint-none-before")
        return [Observation("learning", fact("story-run-diverged"), (how, before), calmer)]
    findings = _unlearned(run, calmer, recipe)
    if not findings and finished:
        findings = [*_earlier_best(run), *_gap(run)]
    return findings + _idle(rate)


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


def _unlearned(run: StoredRun, calmer: tuple[Fact, ...], recipe: str) -> list[Observation]:
    losses = _series(run, "train/loss")
    if len(losses) < 3:
        return []
    (first, start), (last, end) = losses[0], losses[-1]
    lowest = start
    for step, value in losses[1:]:
        if value > 3 * abs(lowest) and value > start:
            return [
                Observation(
                    "learning", fact("loss-jumped", lowest=lowest, value=value, step=step), (), calmer
                )
            ]
        lowest = min(lowest, value)
    if end >= 0.98 * start > 0:
        tries = typed_text(f"chipwise find-lr {recipe}"), typed_text(f"chipwise check {recipe}")
        flat = fact("loss-did-not-fall", start=start, first=first, end=end, last=last)
        return [Observation("learning", flat, (), tries)]
    return []


def _held_out(run: StoredRun) -> int | None:
    task = run.recipe.get("task")
    data = task.get("eval") if isinstance(task, dict) else None
    examples = data.get("examples") if isinstance(data, dict) else None
    return examples if isinstance(examples, int) and number(examples) is not None and examples > 0 else None


def _chance(value: float, examples: int | None) -> float:
    """The standard error of an accuracy over `examples` examples."""
    return math.sqrt(max(value * (1 - value), 0.0) / examples) if examples and 0 <= value <= 1 else math.inf


def _earlier_best(run: StoredRun) -> list[Observation]:
    losses = _series(run, "eval/loss")
    if len(losses) < 5:
        return []
    (best_at, best), (last_at, last) = min(losses, key=lambda pair: pair[1]), losses[-1]
    if sum(step > best_at for step, _ in losses) < 3 or not last > WORSE * best > 0:
        return []
    lower = fact("loss-lowest-before-the-end", best=best, step=best_at, end=last, last=last_at)
    tries = fact("try-decay-or-augmentation"), typed_text(f"--set duration={_until(run, best_at)}")
    return [Observation("learning", lower, (), tries)]


def _until(run: StoredRun, step: int) -> str:
    epoch = next((number(row.get("epoch")) for row in run.rows if row["step"] == step), None)
    return f"{epoch:.3g}ep" if epoch else f"{step}st"


def _gap(run: StoredRun) -> list[Observation]:
    train, held_out = _series(run, "train/accuracy"), _series(run, "eval/accuracy")
    if not train or not held_out:
        return []
    a, b = train[-1][1], held_out[-1][1]
    if a - b < GAP or a - b < 2 * _chance(b, _held_out(run)):
        return []
    devices, step = (run.result or {}).get("devices"), run.rows[-1]["step"]
    running = isinstance(devices, dict) and devices.get("task_state")
    if running and unsettled({"train/accuracy": a, "eval/accuracy": b}, step):
        begun = fact("statistics-at-their-start", train=a, eval=b, steps=step)
        return [Observation("learning", begun, (), (fact("try-lower-momentum"),))]
    tries = fact("try-decay-or-augmentation"), fact("try-more-examples")
    return [Observation("learning", fact("accuracy-gap", train=a, eval=b), (), tries)]


def _idle(rate: Mapping[str, Any]) -> list[Observation]:
    values, steps = rate.get("values"), rate.get("steps")
    if not values or not steps or len(values) < 20 or max(values) <= 0:
        return []
    last = max(k for k, value in enumerate(values) if value > 1e-5 * max(values))
    idle = 1 - (steps[last] + 1) / (steps[-1] + 1)
    if idle < IDLE:
        return []
    finding = fact("schedule-ends-early", name=rate["name"], step=steps[last] + 1, share=idle)
    return [Observation("settings", finding, (), (fact("try-lengths-in-percent"),))]


# ---- time


def slow(
    run: StoredRun, timed: Sequence[Interval], spent: TimeSpent | None, speed: Speed | None, recipe: str
) -> list[Observation]:
    """Findings about time, largest cost first. *Arguments:* `recipe`: as typed in a command."""
    return [
        *_input(run, timed, recipe),
        *_sections(run, spent),
        *_intervals(timed),
        *_peak(run, speed, recipe),
    ]


def stored(run: StoredRun, part: str) -> Mapping[str, Any]:
    """An object of result.json; empty if missing."""
    value = (run.result or {}).get(part)
    return value if isinstance(value, dict) else {}


def _input(run: StoredRun, timed: Sequence[Interval], recipe: str) -> list[Observation]:
    tries = [typed_text(f"chipwise bench {recipe} --feed-only")]
    feed, sections = stored(run, "feed"), stored(run, "seconds")
    if (share := number(feed.get("waited_share"))) is not None:
        if share < FED:
            return []
        waited, train = number(feed.get("waited_seconds")), number(sections.get("train"))
        finding = fact("waited-for-data", waited=waited, seconds=train, share=share)
        also = [
            fact("feed-verdict", verdict=one_line(v)) for v in [feed.get("verdict")] if isinstance(v, str)
        ]
        advice = feed.get("advice")
        if isinstance(advice, dict) and isinstance(advice.get("text"), str):
            tries.insert(0, fact("try-as-told", words=one_line(advice["text"])))
        return [Observation("time", finding, also, tries)]
    total = sum(i.seconds for i in timed)
    lost = sum(i.seconds * (i.waited or 0.0) for i in timed)
    if not total or lost / total < FED:
        return []
    busy: dict[str, float] = {}
    for row in run.rows:
        for stage in NAMES:
            busy[stage] = busy.get(stage, 0.0) + (number(row.get(f"feed/{stage}_cores")) or 0.0)
    also = [fact("busiest-stage", stage=max(busy, key=lambda s: busy[s]))] if any(busy.values()) else []
    finding = fact("waited-for-data", waited=lost, seconds=total, share=lost / total)
    return [Observation("time", finding, also, tries)]


def _sections(run: StoredRun, spent: TimeSpent | None) -> list[Observation]:
    """Work other than training that took a large share of the wall time, known only from result.json."""
    if spent is None or spent.of != "result.json":
        return []
    total, parts = spent.total, spent.parts
    if total < SHORT:
        return []
    resident = stored(run, "feed").get("data") == "on the device"
    evaluations = [row for row in run.rows if any(name.startswith("eval/") for name in row)]

    rarer = _rarer(evaluations, parts.get("evaluate", 0.0) / total)
    rules: list[tuple[str, str, dict[str, Any], list[Fact]]] = [
        # If the data is to stay on the device, all of it is read before the first step
        ("start", "starting-large", {}, [typed_text("--feed host")] if resident else []),
        ("compile", "compiling-large", {}, [typed_text("export JAX_COMPILATION_CACHE_DIR=~/.cache/jax")]),
        ("evaluate", "evaluating-large", {"times": len(evaluations)}, [typed_text(rarer)]),
        ("checkpoint", "saving-large", {}, [typed_text("--checkpoint-every 25%"), fact("try-faster-disk")]),
    ]
    found = []
    for name, code, more, tries in rules:
        if (part := parts.get(name, 0.0)) / total >= LARGE:
            large = Fact(code, {"seconds": part, "total": total, "share": part / total, **more})
            found.append(Observation("time", large, (), tries))
    return found


def _rarer(evaluations: Sequence[Mapping[str, Any]], share: float) -> str:
    epochs = [e for row in evaluations if (e := number(row.get("epoch"))) is not None]
    every = statistics.median(b - a for a, b in itertools.pairwise(epochs)) if len(epochs) > 1 else 0.0
    if every <= 0:
        return "--eval-every end"
    return f"--eval-every {max(every * math.ceil(share / SMALL), 0.001):.3g}ep"


def _intervals(timed: Sequence[Interval]) -> list[Observation]:
    steady = [i for i in timed if not i.warmup]
    if len(steady) < ENOUGH:
        return []
    median = statistics.median(i.speed for i in steady)
    slow = [i for i in steady if i.speed < SLOW * median]
    lost = sum(i.seconds * (1 - i.speed / median) for i in slow)
    total = sum(i.seconds for i in timed)
    if not slow or lost < NOTABLE * total:
        return []
    worst = sorted(sorted(slow, key=lambda i: i.speed)[:5], key=lambda i: i.first)
    steps = [f"{i.first:,}-{i.last:,} ({i.speed:,.0f})" for i in worst]
    finding = fact(
        "intervals-slow", count=len(slow), median=median, lost=lost, total=total, steps=steps,
        worst=[[i.first, i.last, i.speed] for i in worst],
    )  # fmt: skip
    waited = sum(i.seconds * (i.waited or 0.0) for i in slow)
    if waited >= lost / 2:
        cause = fact("slow-by-waiting", waited=waited)
    elif any(i.waited is not None for i in slow):
        cause = fact("slow-without-waiting")
    else:
        cause = fact("slow-waiting-unknown")
    return [Observation("time", finding, (cause,), (fact("try-what-else-ran"),))]


def _peak(run: StoredRun, speed: Speed | None, recipe: str) -> list[Observation]:
    if speed is None or not speed.share_of_peak or speed.share_of_peak >= LOW_PEAK:
        return []
    precision = run.recipe.get("precision")
    commands = [f"chipwise find-batch {recipe}", f"chipwise bench {recipe} --profile"]
    if precision == "f32":
        commands.insert(0, "--set precision=bf16")
    finding = fact("chip-little-used", share=speed.share_of_peak, precision=one_line(precision))
    return [Observation("time", finding, (), tuple(map(typed_text, commands)))]
