"""How often `chipwise referee` errs, how many pairs it takes, and what it says of changes that are known.

    python benchmarks/referee.py --cifar10 DIR > benchmarks/referee.md

First by simulation: differences of pairs that are normal, looked at after every pair. Then the book of
tries. Then changes of `digits` in 5 epochs and of a quarter DavidNet: refactors and other first weights,
which change nothing, and settings that do; with the pairs and the time that the first two pairs predicted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import platform
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
from scipy import stats

import chipwise as cw
from chipwise.study.referee.ruling import Ruling
from chipwise.study.referee.sequential import _half
from chipwise.study.referee.tries import Tries

LEVEL = 0.05


def halves(most: int, level: float) -> np.ndarray:
    """Half the interval's width after 1, 2, ... values whose squared deviations add to 1."""
    return np.array([_half(n, 1 / (n - 1), level) if n > 1 else math.inf for n in range(1, most + 1)])


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


# ---- changes of recipes


@dataclasses.dataclass
class Case:
    """A recipe whose changes are judged: `words` after its name, `real` changes with their expected side."""

    name: str
    words: tuple[str, ...]
    metric: str
    real: dict[str, tuple[str | Callable[[cw.Recipe], cw.Recipe], str]]
    data: str | None = None
    others: int = 25  # sets of other first weights
    spend: float = 20  # seconds a null may take; a real one five times that

    @functools.cached_property
    def base(self) -> cw.Recipe:
        return cw.load(self.name, self.words, data=self.data)

    def changed(self, *words: str) -> cw.Recipe:
        """With other settings; the data are read once."""
        made, task = cw.load(self.name, [*self.words, *words], data=self.data), self.base.task
        return dataclasses.replace(
            made, task=dataclasses.replace(made.task, train=task.train, eval=task.eval)
        )


def begun_otherwise(made: cw.Recipe, salt: int) -> cw.Recipe:
    """Other first weights for each seed: runs differ, and nothing is better."""
    init = made.task.init
    task = dataclasses.replace(made.task, init=lambda key: init(jax.random.fold_in(key, salt)))
    return dataclasses.replace(made, task=task)


def with_loss(made: cw.Recipe, loss: Callable) -> cw.Recipe:
    return dataclasses.replace(made, task=dataclasses.replace(made.task, loss=loss))


def renamed(made: cw.Recipe) -> cw.Recipe:
    def another_name(params, state, batch, key, train):
        unused = batch["image"].shape  # noqa: F841
        return made.task.loss(params, state, batch, key, train)

    return dataclasses.replace(with_loss(made, another_name), name="another")


def split(made: cw.Recipe) -> cw.Recipe:
    """The loss in two functions and a class, with the dict made in another order."""

    class Learner:
        def __init__(self, task):
            self.task = task

        def sums(self, *arguments):
            sums, state = self.task.loss(*arguments)
            return dict(reversed(sums.items())), state

        def __call__(self, params, state, batch, key, train):
            return self.sums(params, state, batch, key, train)

    return with_loss(made, Learner(made.task))


def never_used(made: cw.Recipe) -> cw.Recipe:
    """A branch that is not taken, and a value that nobody reads."""

    def loss(params, state, batch, key, train):
        jax.numpy.square(batch["image"].astype("float32")).sum()
        if train is None:
            raise AssertionError
        return made.task.loss(params, state, batch, key, train)

    return with_loss(made, loss)


def partial(made: cw.Recipe) -> cw.Recipe:
    return with_loss(made, functools.partial(made.task.loss))


REFACTORS = {
    "the same": lambda made: made, "renamed": renamed, "in a class": split,
    "dead code": never_used, "partial": partial,
}  # fmt: skip


def smoothed(made: cw.Recipe) -> cw.Recipe:
    """Evaluated with labels of which 0.9 go to all classes: an evaluation of something else."""

    def loss(params, state, batch, key, train):
        sums, state = made.task.loss(params, state, batch, key, train)
        if not train:
            return sums, state
        logits = made.task.predict(params, state, {"image": batch["image"]})
        even = -jax.nn.log_softmax(logits).mean(axis=1)
        total = 0.1 * sums["loss"].total + 0.9 * even.sum()
        return {**sums, "loss": cw.Sum(total, sums["loss"].count)}, state

    return with_loss(made, loss)


DIGITS = Case(
    "digits", ("duration=5ep",), "eval/loss",
    {
        "a third of the rate": ("lr=0.001", "worse"),
        "three times the rate": ("lr=0.01", "better"),
        "batch 256": ("batch=256", "worse"),
        "batch 32": ("batch=32", "better"),
        "labels smoothed by 0.9": (smoothed, "worse"),
        "10 epochs": ("duration=10ep", "better"),
        "2 epochs": ("duration=2ep", "worse"),
        "a sixth more of the rate": ("lr=0.0035", "better"),
        "a sixth less of the rate": ("lr=0.0025", "worse"),
        "a thirtieth more of the rate": ("lr=0.0031", "better"),
        "a twelfth shorter": ("duration=103st", "worse"),
    },
)  # fmt: skip
DAVIDNET = Case(
    "cifar10-davidnet",
    ("width=16", "precision=f32", "batch=64", "replicas=4", "duration=150st", "lr=1.5"),
    "eval/loss",
    {
        "a tenth of the rate": ("lr=0.15", "worse"),
        "twenty times the rate": ("lr=30", "worse"),
        "half as long": ("duration=75st", "worse"),
        "labels smoothed by 0.9": (smoothed, "worse"),
        "half the width": ("width=8", "worse"),
    },
    others=5,
    spend=400,
)  # fmt: skip


def judged(case: Case, name: str, change: cw.Recipe, expected: str, folder: str, spend: float) -> Ruling:
    began, here = time.perf_counter(), cw.On(devices=1)
    costs: list[float | None] = []

    def hear(told) -> None:
        if told.code.startswith("referee-cost"):
            costs.append(told.numbers.get("seconds"))

    found = cw.referee.referee(
        case.base, change, metric=case.metric, run=folder, spend=spend, on=here, say=hear
    )
    seconds = time.perf_counter() - began
    pairs = f"{found.predicted or '-'} | {len(found.values)}"
    cost = f"{costs[0]:.0f} s" if costs and costs[0] else "-"
    print(f"| {name} | {expected} | **{found.verdict}** | {pairs} | {cost} | {seconds:.1f} s |", flush=True)
    return found


def real(case: Case) -> None:
    print(f"\n## Changes of `{case.name}`\n")
    print(
        f"`{' '.join(case.words)}`, `{case.metric}`, one device; a book for each change: each has the level"
    )
    print("of a first try.\n")
    print("| change | it should be | verdict | pairs, predicted | spent | time, predicted | spent |")
    print("|---|---|---|---|---|---|---|")
    base, wrong, ratios = case.base, 0, []
    with tempfile.TemporaryDirectory() as folder:
        for name, change in REFACTORS.items():
            found = judged(case, name, change(base), "same", f"{folder}/{name}", case.spend)
            wrong += found.verdict != "same"
        for salt in range(1, case.others + 1):
            change = begun_otherwise(base, salt)
            found = judged(case, f"other weights, {salt}", change, "open", f"{folder}/{salt}", case.spend)
            wrong += found.verdict not in ("open", "equal")
        print(f"|  | {wrong} of {len(REFACTORS) + case.others} nulls wrong | | | | | |")
        for name, (change, expected) in case.real.items():
            made = case.changed(change) if isinstance(change, str) else change(base)
            found = judged(case, name, made, expected, f"{folder}/{name}", 5 * case.spend)
            if found.predicted and found.verdict != "open":
                ratios.append(found.predicted / len(found.values))
    within = sum(0.5 <= ratio <= 2 for ratio in ratios)
    print(f"\nPairs within a factor of two of what the first two predicted: {within} of {len(ratios)}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cifar10", help="the folder of CIFAR-10: changes of a quarter DavidNet too")
    parser.add_argument("--others", type=int, default=25, help="nulls of digits with other first weights")
    given = parser.parse_args()
    print("# Verdicts on changes\n")
    print(f"`python benchmarks/referee.py`: CPU of kind {platform.machine()}, JAX {jax.__version__}.\n")
    by_simulation()
    the_book()
    real(dataclasses.replace(DIGITS, others=given.others))
    if given.cifar10:
        real(dataclasses.replace(DAVIDNET, data=given.cifar10))
