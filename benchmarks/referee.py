"""How often `chipwise referee` errs, how many pairs it takes, and what it says of changes that are known.

    python benchmarks/referee.py > benchmarks/referee.md

First by simulation: differences of pairs that are normal, looked at after every pair. Then the book of tries.
Then changes of `digits` in 5 epochs: refactors and other seeds, which change nothing, and settings that do.
"""

from __future__ import annotations

import dataclasses
import math
import platform
import tempfile
import time

import jax
import numpy as np
from scipy import stats

import chipwise as cw
from chipwise.referee.sequential import _half
from chipwise.referee.tries import Tries

LEVEL = 0.05
LENGTH = "5ep"


def halves(most: int, level: float) -> np.ndarray:
    """Half the interval's width after 1, 2, ... values whose squared deviations add to 1."""
    return np.array([_half(n, 1.0, level) if n > 1 else math.inf for n in range(1, most + 1)])


def looked_at(effect: float, sequences: int, most: int, level: float) -> tuple[np.ndarray, np.ndarray]:
    """After how many pairs each sequence reached a verdict, `most + 1` for none, and whether it was wrong."""
    values = np.random.default_rng(7).normal(effect, 1, (sequences, most))
    n = np.arange(1, most + 1)
    means = np.cumsum(values, 1) / n
    squares = np.maximum(np.cumsum(values**2, 1) - n * means**2, 0)
    with np.errstate(invalid="ignore"):
        width = np.nan_to_num(np.sqrt(squares) * halves(most, level), nan=math.inf)
    reached = np.abs(means) > width
    first = np.where(reached.any(1), reached.argmax(1) + 1, most + 1)
    at = means[np.arange(sequences), np.minimum(first, most) - 1]
    return first, reached.any(1) & ((at < 0) if effect > 0 else np.bool_(True))


def by_simulation() -> None:
    print("## By simulation\n")
    print(
        "| effect, deviations | in 20 pairs | in 60 | in 200 | pairs, median | wrong | fixed t-test of 20 |"
    )
    print("|---|---|---|---|---|---|---|")
    for effect in (0, 0.5, 1, 2, 5):
        first, wrong = looked_at(effect, 10_000, 200, LEVEL)
        shares = [f"{np.mean(first <= n):.1%}" for n in (20, 60, 200)]
        limit = stats.t.ppf(1 - LEVEL / 2, 19)
        fixed = stats.nct.sf(limit, 19, effect * 20**0.5) + stats.nct.cdf(-limit, 19, effect * 20**0.5)
        median = int(np.median(first))
        middle = "none" if median > 200 else median
        print(f"| {effect} | {' | '.join(shares)} | {middle} | {np.mean(wrong):.2%} | {fixed:.1%} |")
    print("\n10,000 sequences each, looked at after every pair.\n")


def the_book() -> None:
    """Sequences of 50 nulls and 5 effects of 2 deviations, 100 pairs each at the most."""
    rng = np.random.default_rng(3)
    shares, found = [], []
    widths: dict[float, np.ndarray] = {}
    for _ in range(1000):
        real = rng.permutation(55) < 5
        tries = Tries.__new__(Tries)
        tries.rows, tries.error = [], LEVEL
        reached = np.zeros(55, bool)
        for number, effect in enumerate(real):
            key = {"base": "", "change": number, "metric": "", "margin": None}
            level = tries.level(key)
            width = widths.setdefault(level, halves(100, level))
            values, n = rng.normal(2.0 * effect, 1, 100), np.arange(1, 101)
            means = np.cumsum(values) / n
            squares = np.maximum(np.cumsum(values**2) - n * means**2, 0)
            with np.errstate(invalid="ignore"):
                reached[number] = np.any(
                    np.abs(means) > np.nan_to_num(np.sqrt(squares) * width, nan=math.inf)
                )
            tries.rows.append(
                {**key, "verdict": "better" if reached[number] else "open", "level": level, "pairs": 1}
            )
        shares.append(np.sum(reached & ~real) / max(1, reached.sum()))
        found.append(np.sum(reached & real) / 5)
    print("## The book of tries\n")
    print(
        "1,000 books of 50 nulls and 5 effects of two deviations, in random order, at most 100 pairs a try:"
    )
    print(f"{np.mean(shares):.2%} of the verdicts were wrong (at most {LEVEL:.0%} are allowed), and")
    print(f"{np.mean(found):.1%} of the effects were found.\n")


# ---- changes of digits


def base() -> cw.Recipe:
    return settings()


def begun_otherwise(salt: int) -> cw.Recipe:
    """Other first weights for each seed: runs differ, and nothing is better."""
    made = base()
    init = made.task.init
    task = dataclasses.replace(made.task, init=lambda key: init(jax.random.fold_in(key, salt)))
    return dataclasses.replace(made, task=task)


def refactored() -> cw.Recipe:
    made = base()

    def another_name(params, state, batch, key, train):
        unused = batch["image"].shape  # noqa: F841
        return made.task.loss(params, state, batch, key, train)

    return dataclasses.replace(made, task=dataclasses.replace(made.task, loss=another_name), name="another")


def smoothed() -> cw.Recipe:
    made = base()

    def loss(params, state, batch, key, train):
        sums, state = made.task.loss(params, state, batch, key, train)
        if not train:
            return sums, state
        logits = made.task.predict(params, state, {"image": batch["image"]})
        even = -jax.nn.log_softmax(logits).mean(axis=1)
        return {
            **sums,
            "loss": cw.Sum(0.1 * sums["loss"].total + 0.9 * even.sum(), sums["loss"].count),
        }, state

    return dataclasses.replace(made, task=dataclasses.replace(made.task, loss=loss))


def settings(*words: str) -> cw.Recipe:
    return cw.load("digits", [f"duration={LENGTH}", *words])


NULLS = {"refactored": refactored(), "the same": base()}
REAL = {
    "a third of the rate": (settings("lr=0.001"), "worse"),
    "a tenth of the rate": (settings("lr=0.0003"), "worse"),
    "three times the rate": (settings("lr=0.01"), "better"),
    "batch 256": (settings("batch=256"), "worse"),
    "batch 32": (settings("batch=32"), "better"),
    "labels smoothed by 0.9": (smoothed(), "worse"),
    "10 epochs": (settings("duration=10ep"), "better"),
    "2 epochs": (settings("duration=2ep"), "worse"),
}


def judged(name: str, change: cw.Recipe, expected: str, folder: str) -> None:
    began, here = time.perf_counter(), cw.On(devices=1)
    found = cw.referee.referee(base(), change, metric="eval/loss", run=folder, spend=30, on=here)
    seconds = time.perf_counter() - began
    pairs = f"{len(found.values)} (predicted {found.predicted})" if found.predicted else len(found.values)
    print(f"| {name} | {expected} | **{found.verdict}** | {pairs} | {seconds:.1f} s |", flush=True)


def real() -> None:
    print("## Changes of `digits`\n")
    print(f"{LENGTH}, `eval/loss`, one device; a book for each change: each has the level of a first try.\n")
    print("| change | it should be | verdict | pairs | time |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, change) in enumerate(NULLS.items()):
            judged(name, change, "the same", f"{folder}/null-{number}")
        for salt in (1, 2, 3):
            judged(f"other first weights, {salt}", begun_otherwise(salt), "open", f"{folder}/salt-{salt}")
        for number, (name, (change, expected)) in enumerate(REAL.items()):
            judged(name, change, expected, f"{folder}/real-{number}")


if __name__ == "__main__":
    print("# Verdicts on changes\n")
    print(f"`python benchmarks/referee.py`: CPU of kind {platform.machine()}, JAX {jax.__version__}.\n")
    by_simulation()
    the_book()
    real()
