"""How often `chipwise referee` errs, how many pairs it takes, and what it says of changes that are known.

    python -m benchmarks.referee --case mnist --data DIR    # further rows of referee.csv
    python -m benchmarks.referee > benchmarks/referee.md    # the page, of the rows that there are

First by simulation: differences of pairs that are normal, looked at after every pair. Then the book of
tries. Then changes of `digits`, of `mnist` and of a quarter DavidNet, as `referee_changes.py` has them.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import time
from pathlib import Path

import jax
import numpy as np
from scipy import stats

from chipwise.study.referee.sequential import FEWEST, _half
from chipwise.study.referee.tries import Tries

from .referee_changes import CASES, NULLS, Case, measured, rows_in

ROWS = Path(__file__).with_suffix(".csv")
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


def ended_well(row: dict[str, str]) -> bool:
    """Whether the verdict is the one expected. Runs of a null may also be called equal."""
    return row["verdict"] == row["expected"] or (row["kind"] == "null" and row["verdict"] == "equal")


def spread(values: list[float], unit: str = "") -> str:
    """The median of the values, and their range."""
    if not values:
        return "-"
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g}){unit}"


def ratio(row: dict[str, str], name: str) -> float:
    """What was spent by what the first two pairs predicted."""
    return float(row[name]) / float(row[f"{name}_predicted"])


def changes(case: Case, rows: list[dict[str, str]]) -> None:
    own = [row for row in rows if row["recipe"] == case.name]
    nulls, reals = ([row for row in own if row["kind"] == kind] for kind in ("null", "real"))
    drawn = [row for row in nulls if row["expected"] == "open"]
    could = [row for row in drawn if int(row["pairs"]) >= FEWEST]
    wrong = [row for row in nulls if not ended_well(row)]
    print(f"\n## Changes of `{case.name}`\n")
    print(f"`{' '.join(case.words)}`, `{case.metric}`, one device.\n")
    print(f"**{len(wrong)} wrong of {len(nulls)} nulls** that were judged, of {NULLS}.")
    print(f"{len(nulls) - len(drawn)} are refactors.")
    if drawn:
        pairs, seconds = (spread([float(row[name]) for row in drawn]) for name in ("pairs", "seconds"))
        print(f"{len(drawn)} draw their first weights from another key, and {len(could)} of these had the")
        print(f"{FEWEST} pairs of which a verdict may come. They took {pairs} pairs and {seconds} seconds.")
    print()
    if wrong:
        print("Wrong: " + ", ".join(f"{row['change']}: {row['verdict']}" for row in wrong) + ".\n")
    if not reals:
        print("Changes that matter were not judged yet.")
        return
    print("| change | it should be | verdict | pairs, predicted | spent | seconds, predicted | spent |")
    print("|---|---|---|---|---|---|---|")
    for row in reals:
        seconds = f"{float(row['seconds_predicted']):.0f}" if row["seconds_predicted"] else "-"
        print(
            f"| {row['change']} | {row['expected']} | **{row['verdict']}** | {row['pairs_predicted'] or '-'} "
            f"| {row['pairs']} | {seconds} | {float(row['seconds']):.0f} |"
        )
    reached = [row for row in reals if row["verdict"] != "open" and row["pairs_predicted"]]
    if reached:
        pairs = spread([ratio(row, "pairs") for row in reached])
        seconds = spread([ratio(row, "seconds") for row in reached])
        print(f"\nSpent by predicted, of {len(reached)} verdicts: pairs {pairs}, seconds {seconds}.")


def page() -> None:
    print("# Verdicts on changes\n")
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    cpu = next((line.partition(": ")[2] for line in lines if "model name" in line), platform.machine())
    print(f"`python -m benchmarks.referee`: {cpu}, {os.cpu_count()} cores, JAX {jax.__version__}.")
    print(
        "The rows of `digits` are of an earlier run in quiet. Beside those of the others the machine did much"
    )
    print("other work, so their seconds say little.\n")
    by_simulation()
    the_book()
    rows = rows_in(ROWS)
    for case in CASES.values():
        changes(case, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, help="whose changes to judge, instead of the page")
    parser.add_argument("--data", help="the folder of its data")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no change begins")
    given = parser.parse_args()
    if given.case:
        measured(CASES[given.case], given.data, ROWS, time.monotonic() + 60 * given.minutes)
    else:
        page()
