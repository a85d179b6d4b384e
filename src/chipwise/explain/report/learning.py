"""What a run learned, or did not: signs of a rate too high, of overfitting, of a run too short.

A sign is no proof. Each comes with the figures that it rests on, and an accuracy counts as lower only where
chance over the held-out examples does not explain it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.stored import number
from ...errors import RecipeError
from ...recipe.duration import Duration
from .advice import Advice
from .folder import RunFiles
from .words import figure, plain, share

IDLE = 0.10  # share of a run without any rate
WORSE = 1.1  # evaluation loss at the end over its lowest
GAP = 0.05  # accuracy on training examples less that on held-out ones
FALLING = 0.9  # training loss of the last fifth over that of the fifth before


def learned(
    files: RunFiles, finished: bool, rate: Mapping[str, Any], lower: str | None, typed: str | None
) -> list[Advice]:
    """About what was learned. *Arguments:* `rate`: as `schedule.curve` gives it; `lower`: as `lower_rate`
    does; `typed`: the recipe as one types it."""
    made = _diverged(files, lower, typed or "RECIPE")
    if made:
        return made
    found = _unlearned(files, lower, typed or "RECIPE")
    if not found and finished:
        found = [*_earlier_best(files), *_gap(files), *_still_falling(files)]
    return found + _idle(rate)


def broken(files: RunFiles) -> Mapping[str, Any] | None:
    """The row that says that the run diverged; without one the first with a loss that is not finite."""
    told = (row for row in files.rows if "diverged" in row)
    return next(told, next((row for row in files.rows if _not_finite(row)), None))


def _not_finite(row: Mapping[str, Any]) -> bool:
    losses = [row[name] for name in ("train/loss", "eval/loss") if name in row]
    return any(x is None or (isinstance(x, float) and not math.isfinite(x)) for x in losses)


def when(files: RunFiles, row: Mapping[str, Any]) -> str:
    """What became of the run at the row of `broken`, between which steps, as the run says it."""
    if "diverged" in row:
        return plain(row["diverged"]).rstrip(".")
    before = max((r["step"] for r in files.rows if r["step"] < row["step"]), default=0)
    return f"A loss was not finite between steps {before + 1:,} and {row['step']:,}"


def lower_rate(rate: Mapping[str, Any], doubts: Sequence[Advice]) -> str | None:
    """A setting to try where the rate was too high, such as `lr=0.1`: what `chipwise check` names, where that
    is lower, else a third of the peak. `None` where that is not known."""
    highest = number(rate.get("peak"))
    if not highest:
        return None
    begin = f"--set {rate['name']}="
    named = [text.removeprefix(begin) for a in doubts for text in a.attempt if text.startswith(begin)]
    usual = next((text for text in named if _below(text, highest)), None)
    return f"{rate['name']}={usual or f'{highest / 3:.2g}'}"


def _below(text: str, highest: float) -> bool:
    try:
        return float(text) < highest
    except ValueError:  # prose
        return False


def _diverged(files: RunFiles, lower: str | None, typed: str) -> list[Advice]:
    row = broken(files)
    if row is None:
        return []
    good = [step for step in files.checkpoints if step < row["step"]]
    kept = (
        f"The last checkpoint before it is of step {good[-1]:,}."
        if good
        else "There is no checkpoint from before."
    )
    evidence = f"{when(files, row)}. {kept}"
    return [Advice("learning", "The run diverged.", evidence, _calmer(lower, typed))]


def _calmer(lower: str | None, typed: str) -> tuple[str, ...]:
    less = "a lower learning rate" if lower is None else f"--set {lower}"
    return less, "--set clip=1.0", f"chipwise find-lr {typed}"


def _series(files: RunFiles, name: str) -> list[tuple[int, float]]:
    return [(row["step"], value) for row in files.rows if (value := number(row.get(name))) is not None]


def _unlearned(files: RunFiles, lower: str | None, typed: str) -> list[Advice]:
    losses = _series(files, "train/loss")
    if len(losses) < 3:
        return []
    (first, start), (last, end) = losses[0], losses[-1]
    lowest, jump = start, None
    for step, value in losses[1:]:
        if value > 3 * abs(lowest) and value > start and jump is None:
            jump = (step, value, lowest)
        lowest = min(lowest, value)
    if jump is not None:
        step, value, before = jump
        evidence = (
            f"The training loss had been down to {figure(before)} and was {figure(value)} at step {step:,}."
        )
        what = "The training loss jumped, which a rate that is too high does."
        return [Advice("learning", what, evidence, _calmer(lower, typed))]
    if end >= 0.98 * start > 0:
        evidence = (
            f"The training loss was {figure(start)} up to step {first:,} and {figure(end)} at step {last:,}."
        )
        what = "The training loss did not fall."
        return [Advice("learning", what, evidence, (f"chipwise find-lr {typed}", f"chipwise check {typed}"))]
    return []


def _held_out(files: RunFiles) -> int | None:
    task = files.recipe.get("task")
    data = task.get("eval") if isinstance(task, dict) else None
    examples = data.get("examples") if isinstance(data, dict) else None
    return examples if isinstance(examples, int) and examples > 0 else None


def _chance(value: float, examples: int | None) -> float:
    """The standard error of an accuracy over so many examples."""
    return math.sqrt(max(value * (1 - value), 0.0) / examples) if examples and 0 <= value <= 1 else math.inf


def _earlier_best(files: RunFiles) -> list[Advice]:
    made = []
    losses = _series(files, "eval/loss")
    if len(losses) >= 5:
        (best_at, best), (last_at, last) = min(losses, key=lambda pair: pair[1]), losses[-1]
        if sum(step > best_at for step, _ in losses) >= 3 and last > WORSE * best > 0:
            evidence = (
                f"It was {figure(best)} at step {best_at:,} and {figure(last)} at step {last_at:,}, the end. "
                "A loss that rises on held-out examples is a sign of overfitting, though the accuracy may "
                "still rise."
            )
            tries = ("more weight decay or augmentation", f"--set duration={_until(files, best_at)}")
            made.append(Advice("learning", "The evaluation loss was lowest before the end.", evidence, tries))
    accuracies = _series(files, "eval/accuracy")
    if len(accuracies) >= 5:
        (best_at, best), (last_at, last) = max(accuracies, key=lambda pair: pair[1]), accuracies[-1]
        error = _chance(best, _held_out(files))
        if best - last > 2 * error * math.sqrt(2):
            evidence = (
                f"It was {share(best)} at step {best_at:,} and {share(last)} at step {last_at:,}, further "
                f"apart than chance over {_held_out(files):,} examples explains (standard error "
                f"{100 * error:.2g} points)."
            )
            shorter = f"--set duration={_until(files, best_at)}"
            made.append(Advice("learning", "The best accuracy came before the end.", evidence, (shorter,)))
    return made


def _until(files: RunFiles, step: int) -> str:
    epoch = next((number(row.get("epoch")) for row in files.rows if row["step"] == step), None)
    return f"{epoch:.3g}ep" if epoch else f"{step}st"


def _gap(files: RunFiles) -> list[Advice]:
    train, held_out = _series(files, "train/accuracy"), _series(files, "eval/accuracy")
    if not train or not held_out:
        return []
    a, b = train[-1][1], held_out[-1][1]
    if a - b < GAP or a - b < 2 * _chance(b, _held_out(files)):
        return []
    evidence = (
        f"At the end {share(a)} of training examples and {share(b)} of held-out ones: a sign of overfitting. "
        "The training figure is of the last interval, with augmentation and dropout where the recipe has "
        "them, which makes the gap look smaller."
    )
    attempt = ("more weight decay or augmentation", "more training examples")
    return [Advice("learning", "It knows the training examples better.", evidence, attempt)]


def _still_falling(files: RunFiles) -> list[Advice]:
    losses, held_out = _series(files, "train/loss"), _series(files, "eval/loss")
    fifth = len(losses) // 5
    if fifth < 2 or (held_out and held_out[-1][1] > min(value for _, value in held_out)):
        return []
    before = statistics.fmean(value for _, value in losses[-2 * fifth : -fifth])
    last = statistics.fmean(value for _, value in losses[-fifth:])
    if not 0 < last < FALLING * before:
        return []
    evidence = (
        f"The training loss was {figure(last)} on average over the last {fifth} rows and {figure(before)} "
        f"over the {fifth} before"
        + (", and the evaluation loss was lowest at the end" if held_out else "")
        + ". Part of that is a rate that falls to its end: only a longer run can tell what it would gain."
    )
    return [Advice("learning", "The loss was still falling at the end.", evidence, _longer(files))]


def _longer(files: RunFiles) -> tuple[str, ...]:
    try:
        duration = Duration.parse(files.recipe.get("duration"))  # type: ignore[arg-type]
    except RecipeError:
        return ()
    return (f"--set duration={2 * float(duration.value):g}{duration.unit} --run another-folder",)


def _idle(rate: Mapping[str, Any]) -> list[Advice]:
    values, steps = rate.get("values"), rate.get("steps")
    if not values or not steps or len(values) < 20 or max(values) <= 0:
        return []
    last = max(k for k, value in enumerate(values) if value > 1e-5 * max(values))
    idle = 1 - (steps[last] + 1) / (steps[-1] + 1)
    if idle < IDLE:
        return []
    evidence = f"{rate['name']} is 0 from about step {steps[last] + 1:,} on, {share(idle)} of the run."
    return [
        Advice(
            "settings", "The schedule ends before the run.", evidence, ("lengths of the schedule in percent",)
        )
    ]
