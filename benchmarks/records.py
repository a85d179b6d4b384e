"""The unpaired sequential test on published noise: 335 final losses of an optimizer race.

    python benchmarks/records.py > benchmarks/records.md

`records.csv` has the losses. How often the test errs, by simulation and where one configuration is split
in two; what it takes beside the race's own rule; whether one deviation is right for all; and every step of
the table, record against record before, with a picture, `records.svg`.
"""

from __future__ import annotations

import csv
import math
import re
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

import chipwise as cw
from chipwise.study.referee.sequential import _apart, _fewest, _half, unpaired

HERE = Path(__file__).parent
SOURCE = "https://github.com/KellerJordan/modded-nanogpt"
TABLE = f"{SOURCE}/tree/f411b3d346aa52d3504324ca93c230fd84c6c07f/records/track_3_optimization"
COPY = re.compile(r"final_val_loss\.txt|fake_log|n9/stdout/|batch_combined")
"""Files that state the loss of a run again which another file states."""
TARGET, SIGMA, RULE = 3.28, 0.0013, 0.004
PER_STEP = 0.0045 / 100
"""The loss that a step is worth, as the race's page estimates it: result 12 in 200 steps fewer."""
OTHERS = (3e-5, 6e-5)
"""Two more values of a step, since that estimate is one rough slope. A verdict holds at all three."""
LEVEL = 0.05


class Record(NamedTuple):
    """A row of the race's table that was a record: its number, steps, mean loss there, runs, the folder of
    its logs, and the p-value against the record before, if the table has one."""

    number: int
    steps: int
    mean: float
    n: int
    folder: str
    p: str = ""


RECORDS = [
    Record(1, 3600, 3.2777, 1, ""),
    Record(3, 3500, 3.2767, 1, ""),
    Record(5, 3325, 3.2782, 10, "20260430_muonh"),
    Record(9, 3250, 3.2771, 8, "20260501_skylight001"),
    Record(11, 3225, 3.2785, 16, "20260501_contra_muon", "0.69"),
    Record(13, 3210, 3.2785, 10, "20260504_muloco_normuonh", "0.099"),
    Record(14, 3150, 3.2776, 4, "20260504_contra_muon_mlp_soapish"),
    Record(16, 3125, 3.2784, 8, "20260506_trustlight", "0.34"),
    Record(20, 3030, 3.2790, 30, "20260509_contra_soft_muon"),
    Record(29, 2990, 3.2787, 11, "20260511_dampen_radial_gradient_component"),
    Record(30, 2930, 3.2784, 16, "20260514_aurora_proj_pruned_extended_contra"),
    Record(34, 2925, 3.2781, 8, "20260520_rre_extrapolation_pr300_2925", "0.168"),
    Record(38, 2900, 3.2786, 9, "20260520_tail_refinterp_2900"),
    Record(40, 2890, 3.2788, 16, "20260522_ema_nesterov_aurora_proj"),
    Record(41, 2875, 3.2790, 20, "20260523_circuit_muon"),
    Record(42, 2860, 3.2789, 16, "20260525_aurora_ema_ref"),
    Record(43, 2850, 3.2786, 13, "20260529_tail_phase_readout_2850"),
    Record(44, 2750, 3.2789, 20, "20260609_soap_f1_auxb2_clean"),
    Record(45, 2720, 3.2786, 10, "20260611_tailema_2720_submission"),
    Record(46, 2690, 3.2783, 8, "20260619_cwd_rowfloor_tailema"),
]


class Configuration(NamedTuple):
    """Runs that differ by their seeds alone: a folder of logs, and how many steps they took."""

    folder: str
    steps: int


def write(text: str) -> None:
    """Prints a paragraph."""
    print(textwrap.fill(" ".join(text.split()), 116, break_long_words=False, break_on_hyphens=False) + "\n")


def read() -> tuple[int, dict[Configuration, np.ndarray]]:
    """The number of rows, and the final losses of each configuration. A run counts once."""
    rows = list(csv.DictReader((HERE / "records.csv").read_text().splitlines()))
    runs: dict[Configuration, list[float]] = {}
    for row in rows:
        folder = re.sub(r"/(idea_\w+/seed_\d+|code_logs)$", "", row["folder"])
        if not COPY.search(row["file"]) and folder != "(top)":
            runs.setdefault(Configuration(folder, int(row["steps"])), []).append(float(row["final_val_loss"]))
    return len(rows), {name: np.array(values) for name, values in runs.items()}


def moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the variance of the first 1, 2, ... of each row's values."""
    n = np.arange(1, values.shape[1] + 1)
    middle = values.mean()  # losses differ in the third digit behind the point
    first = np.cumsum(values - middle, 1) / n
    squares = np.maximum(np.cumsum((values - middle) ** 2, 1) - n * first**2, 0)
    return first + middle, squares / np.maximum(n - 1, 1)


def looked_at(base: np.ndarray, change: np.ndarray, looks: list[tuple[int, int]], level: float) -> np.ndarray:
    """At which of the `looks`, sizes of both samples, each row is refuted first; `len(looks)` if never."""
    (means, variances), (others, spreads) = moments(base), moments(change)
    first = np.full(len(base), len(looks))
    for at, (n, m) in reversed(list(enumerate(looks))):
        # The width is that of variances whose standard error is 1, times the standard error
        scale = _apart([(n, n / 2), (m, m / 2)], level)
        error = np.sqrt(variances[:, n - 1] / n + spreads[:, m - 1] / m)
        half = np.where(error > 0, error * scale, np.inf)
        first = np.where(np.abs(others[:, m - 1] - means[:, n - 1]) > half, at, first)
    return first


SIZES = {
    "as many": lambda k: (k, k),
    "20 of the base first": lambda k: (20, k),
    "4 of the base first": lambda k: (4, k),
    "3 of the base to each": lambda k: (3 * k, k),
}


def by_simulation() -> None:
    print("## By simulation\n")
    write("""Normal values, no difference, looked at after every run of the change from the second to the
        60th: the share of 20,000 sequences that were ever refuted, at 5 %, 0.5 % and 0.05 %, a level that
        the book hands out after many tries and of which 10 sequences are the limit. Columns: the deviation
        of the base over that of the change.""")
    wide = (0.1, 0.3, 1, 3, 10)
    print("| runs of the base | level | " + " | ".join(f"{one:g}" for one in wide) + " |")
    print("|---|---|" + "---|" * len(wide))
    worst = 0.0
    for name, sizes in SIZES.items():
        looks = [sizes(k) for k in range(2, 61)]
        for level in (0.05, 0.005, 0.0005):
            shares = []
            for times in wide:
                rng = np.random.default_rng(11)
                base = rng.normal(0, times, (20_000, max(n for n, _ in looks)))
                change = rng.normal(0, 1, (20_000, 60))
                shares.append(np.mean(looked_at(base, change, looks, level) < len(looks)))
            worst = max(worst, *(share / level for share in shares))
            print(f"| {name} | {level:.2%} | " + " | ".join(f"{share:.3%}" for share in shares) + " |")
    print(f"\nThe largest share is {worst:.2f} of its level.\n")
    print("| effect, deviations | in 20 of each | in 60 | runs of each, median | fixed Welch test of 20 |")
    print("|---|---|---|---|---|")
    looks = [(k, k) for k in range(2, 201)]
    for effect in (0.5, 1, 2, 4):
        rng = np.random.default_rng(12)
        found = looked_at(rng.normal(0, 1, (5000, 200)), rng.normal(effect, 1, (5000, 200)), looks, LEVEL) + 2
        limit, shift = stats.t.ppf(1 - LEVEL / 2, 38), effect * 10**0.5
        fixed = min(1, stats.nct.sf(limit, 38, shift) + np.nan_to_num(stats.nct.cdf(-limit, 38, shift)))
        shares = " | ".join(f"{np.mean(found <= n):.1%}" for n in (20, 60))
        print(f"| {effect:g} | {shares} | {int(np.median(found))} | {fixed:.1%} |")


def on_real_noise(runs: dict[Configuration, np.ndarray]) -> None:
    print("\n## One configuration against itself\n")
    write("""The runs of each configuration with 8 or more, split at random 1,000 times. Halves: a run of
        either half by turns, looked at after each. Base first: one half is there, and the other comes run
        by run. Looks begin with the second run of a half. Every refutation is a false alarm; 5 % are
        allowed.""")
    print("| configuration | runs | halves | base first |")
    print("|---|---|---|---|")
    alarms = []
    for name, losses in runs.items():
        if len(losses) < 8:
            continue
        rng = np.random.default_rng(5)
        shuffled = np.array([rng.permutation(losses) for _ in range(1000)])
        half = len(losses) // 2
        turns = [(k, m) for k in range(2, half + 1) for m in (k, k + 1) if m <= len(losses) - half]
        halves = looked_at(shuffled[:, :half], shuffled[:, half:], turns, LEVEL) < len(turns)
        ahead = [(half, m) for m in range(2, len(losses) - half + 1)]
        later = looked_at(shuffled[:, :half], shuffled[:, half:], ahead, LEVEL) < len(ahead)
        alarms.append((halves.mean(), later.mean()))
        print(f"| {name.folder} | {len(losses)} | {alarms[-1][0]:.1%} | {alarms[-1][1]:.1%} |")
    total = np.mean(alarms, 0)
    print(f"| **all** | | **{total[0]:.2%}** | **{total[1]:.2%}** |")


def deviations(runs: dict[Configuration, np.ndarray]) -> float:
    """Prints the deviation of each configuration. *Returns* the pooled one."""
    several = {name: losses for name, losses in runs.items() if len(losses) >= 5}
    free = sum(len(one) - 1 for one in several.values())
    pooled = math.sqrt(sum(one.var(ddof=1) * (len(one) - 1) for one in several.values()) / free)
    print("\n## Is one deviation right for all?\n")
    print("| configuration | steps | runs | mean loss | deviation | 95 % interval | the rule is p = |")
    print("|---|---|---|---|---|---|---|")
    inside = 0
    for name, losses in sorted(several.items(), key=lambda item: item[1].std(ddof=1)):
        n, deviation = len(losses), losses.std(ddof=1)
        low, high = (deviation * math.sqrt((n - 1) / stats.chi2.ppf(q, n - 1)) for q in (0.975, 0.025))
        inside += low <= SIGMA <= high
        row = (
            name.folder,
            name.steps,
            n,
            f"{losses.mean():.5f}",
            f"{deviation:.5f}",
            f"{low:.5f} to {high:.5f}",
        )
        print("| " + " | ".join(map(str, row)) + f" | {stats.norm.sf(RULE / deviation):.2g} |")
    spread = [one.std(ddof=1) for one in several.values()]
    bartlett, brown = stats.bartlett(*several.values()), stats.levene(*several.values(), center="median")
    residuals = np.concatenate([one - one.mean() for one in several.values()])
    print()
    write(f"""Pooled: {pooled:.5f}, with {free} degrees of freedom; from {min(spread):.5f} to
        {max(spread):.5f}. That all are equal: p = {bartlett.pvalue:.2g} by Bartlett's test, which supposes
        normal values, and p = {brown.pvalue:.2g} by that of Brown and Forsythe, which does not. So nothing
        speaks against one deviation for all: few runs of one spread as much. The interval holds {SIGMA},
        which the rule takes, for {inside} of {len(several)} configurations. Residuals: skewness
        {stats.skew(residuals):.2f}, excess kurtosis {stats.kurtosis(residuals):.2f}. The last column is the
        p-value that the rule's {RULE} stands for if the deviation is that of the row; with the pooled one
        it is {stats.norm.sf(RULE / pooled):.2g}.""")
    return pooled


def below_target(runs: dict[Configuration, np.ndarray]) -> None:
    """Runs until the mean is known to be below the target, by the rule and by the sequential interval."""
    print("\n## Runs until the mean is known to be below 3.28\n")
    write(f"""The rule asks for (3.28 - mean) sqrt(n) ≥ {RULE}, a z-test at p < 0.001 with a deviation of
        {SIGMA}, and is made for one look. The interval estimates the deviation and may be looked at after
        every run; 0.2 % is the rule's p on both sides. Medians of 1,000 random orders of the runs that
        there are; in brackets how many orders never get there.""")
    print("| configuration | runs | mean | the rule | interval, 5 % | interval, 0.2 % |")
    print("|---|---|---|---|---|---|")
    for name, losses in runs.items():
        if len(losses) < 8:
            continue
        rng = np.random.default_rng(6)
        shuffled = np.array([rng.permutation(losses) for _ in range(1000)])
        (means, variances), n = moments(shuffled), np.arange(1, len(losses) + 1)
        reached = [(TARGET - means) * np.sqrt(n) >= RULE]
        for level in (LEVEL, 0.002):
            scale = np.array([math.inf, *(_half(k, 1.0, level) for k in n[1:])])
            with np.errstate(invalid="ignore"):
                half = np.nan_to_num(np.sqrt(variances) * scale, nan=math.inf)
            reached.append(means + half < TARGET)
        cells = []
        for one in reached:
            first = np.where(one.any(1), one.argmax(1) + 1, len(losses) + 1)
            middle = int(np.median(first))
            never = np.mean(first > len(losses))
            cells.append(f"{middle if middle <= len(losses) else 'none'} ({never:.0%})")
        print(f"| {name.folder} | {len(losses)} | {losses.mean():.5f} | {' | '.join(cells)} |")


class Step(NamedTuple):
    """A record against the one before, in loss at equal steps."""

    record: Record
    before: Record
    difference: float
    low: float
    high: float
    verdict: str
    holds: bool
    """Whether each of `OTHERS` gives the same verdict."""


def verdict_of(low: float, high: float) -> str:
    return "better" if high < 0 else "worse" if low > 0 else "not shown"


def record_by_record(runs: dict[Configuration, np.ndarray], pooled: float) -> list[Step]:
    print("\n## Record against record before\n")
    write(f"""The records of [the table]({TABLE}) in its order. A step is worth {PER_STEP:.6f} of the loss,
        as that page estimates it, so the difference is the final loss less that of the record before, less
        the value of the steps that its logs are shorter. The final loss is that of the log's last step,
        where the table states an earlier one: what a method adds at its stated step alone is not in it.
        Below 0 the newer is better. The verdict is that of the sequential interval at 5 % in the order of
        the logs. That interval leaves out the error of the slope, which is one rough estimate: so a column
        has the verdicts at {OTHERS[0]:.6f} and at {OTHERS[1]:.6f} a step. The book is that of all
        comparisons, at 5 % together, at the page's slope. The rule is the page's own, difference / sqrt(1/n
        + 1/m) ≥ {RULE}, at p = 0.001 with one deviation for all. What a verdict takes is reckoned with the
        difference and the deviations of the row. "Not shown" says nothing against a method: it says what
        these logs show.""")
    print(
        "| # | steps | runs | mean | against | difference, 1e-3 | interval, 1e-3 | verdict "
        f"| at {OTHERS[0]:.6f}, at {OTHERS[1]:.6f} | in one book "
        "| runs of each it takes | the rule | runs of each it takes | the table's p |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    found, last = [], None
    folders = {name.folder: (name.steps, losses) for name, losses in runs.items()}
    with tempfile.TemporaryDirectory() as book:
        for record in RECORDS:
            steps, losses = folders.get(record.folder, (0, np.array([])))
            link = f"{TABLE}/results/{record.folder}" if record.folder else f"{TABLE}#notable-results-history"
            start = f"| [{record.number}]({link}) | {record.steps}"
            if len(losses) < 2:
                of = f"{record.mean} of {record.n}" if record.n > 1 else f"{record.mean} of one"
                here = len(losses) if record.folder else 1
                print(f"{start} | {here} here | {of} | | | | no runs to judge | | | | | | {record.p} |")
                continue
            about = f"{start} | {len(losses)} | {losses.mean():.5f}"
            if last is None:
                print(f"{about} | the first with runs | | | | | | | | | |")
                last = (record, steps, losses)
                continue
            before, long, old = last
            new = losses - PER_STEP * (long - steps)
            low, high = unpaired(list(old), list(new), LEVEL)
            difference = new.mean() - old.mean()
            verdict = verdict_of(low, high)
            moved = [(long - steps) * (slope - PER_STEP) for slope in OTHERS]
            others = [verdict_of(low - by, high - by) for by in moved]
            sides = [(len(old), old.var(ddof=1)), (len(new), new.var(ddof=1))]
            takes = _fewest(
                lambda n, sides=sides: _apart([(n, v) for _, v in sides], LEVEL), difference, None
            )
            ruled = -difference / math.sqrt(1 / len(old) + 1 / len(new)) >= RULE
            judged = cw.referee.rows(old.tolist(), new.tolist(), metric="loss", run=book)
            here = {"open": "not shown"}.get(judged.verdict, judged.verdict)
            span = f"{1e3 * low:+.2f} to {1e3 * high:+.2f}" if math.isfinite(high) else "too few runs"
            print(
                f"{about} | {before.number} | {1e3 * difference:+.2f} | {span} | **{verdict}** "
                f"| {', '.join(others)} | {here} "
                f"| {takes or 'over 100,000'} | {'yes' if ruled else 'no'} "
                f"| {math.ceil(2 * (RULE / difference) ** 2):,} | {record.p} |"
            )
            holds = {*others} == {verdict}
            found.append(Step(record, before, difference, low, high, verdict, holds))
            last = (record, steps, losses)
    names = ("better", "not shown", "worse")
    counts = {name: sum(one.verdict == name and one.holds for one in found) for name in names}
    widths = (5e-4, 1e-3, 2e-3)
    takes = [_fewest(lambda n: _apart([(n, pooled**2)] * 2, LEVEL), one, None) for one in widths]
    print()
    hold = ", ".join(f"{n} {name}" for name, n in counts.items())
    write(f"""Of {len(found)} steps, at all three slopes: {hold}. The verdict on the other
        {len(found) - sum(counts.values())} depends on the slope. With the
        pooled deviation of {pooled:.5f}, a difference of 0.0005 takes {takes[0]} runs of each, one of 0.001
        {takes[1]}, one of 0.002 {takes[2]}.""")
    return found


COLOURS = {"better": "#2a7f3f", "not shown": "#777777", "worse": "#b3261e"}


def picture(steps: list[Step]) -> str:
    """The differences with their intervals, the newest record below."""
    low, high, width, row, left = -9.0, 6.0, 760, 26, 170
    height = 60 + row * len(steps)

    def x(value: float) -> float:
        return left + (min(max(value, low), high) - low) / (high - low) * (width - left - 20)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="13" role="img">',
        "<title>Each record's loss less that of the record before, at equal steps</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tick in range(int(low), int(high) + 1, 3):
        shade = "#444" if tick == 0 else "#ddd"
        parts.append(f'<path d="M{x(tick):.1f} 10V{height - 44}" stroke="{shade}"/>')
        label = f"{tick:+d}" if tick else "0"
        parts.append(f'<text x="{x(tick):.1f}" y="{height - 28}" text-anchor="middle">{label}</text>')
    parts.append(
        f'<text x="{(left + width - 20) / 2:.1f}" y="{height - 8}" text-anchor="middle">'
        "loss less that of the record before, at equal steps, in 1e-3: better on the left</text>"
    )
    for at, one in enumerate(steps):
        y, colour = 24 + row * at, COLOURS[one.verdict]
        span = [x(1e3 * end) for end in (one.low, one.high)]
        name = f"{one.record.number} against {one.before.number}: {one.verdict}"
        parts.append(f'<text x="8" y="{y + 4}" fill="{colour}">{name}</text>')
        parts.append(f'<path d="M{span[0]:.1f} {y}H{span[1]:.1f}" stroke="{colour}" stroke-width="3"/>')
        parts.append(
            f'<circle cx="{x(1e3 * one.difference):.1f}" cy="{y}" r="5" stroke="{colour}" '
            f'fill="{colour if one.holds else "white"}"/>'
        )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    rows, runs = read()
    print("# The records of a race, by the referee\n")
    count = sum(map(len, runs.values()))
    write(f"""`python benchmarks/records.py`. The losses are those of `records.csv`: the last validation
        loss of every log of [a race]({TABLE}) for optimizers of a fixed net, data and batch, MIT License
        (`records.LICENSE`), at commit f411b3d3. Nothing was trained here. Of its {rows} rows, {count} are
        runs of {len(runs)} configurations, a folder and a number of steps each; the others state a run
        again, or are single logs of several configurations in one folder.""")
    by_simulation()
    on_real_noise(runs)
    pooled = deviations(runs)
    below_target(runs)
    steps = record_by_record(runs, pooled)
    (HERE / "records.svg").write_text(picture(steps))
    print(
        "![Each record's loss less that of the record before, with its interval; "
        "hollow where another slope gives another verdict](records.svg)"
    )


if __name__ == "__main__":
    main()
