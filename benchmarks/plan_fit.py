"""Fits what a plan takes from published training throughputs, to the rows that may be fitted and no others.

    python -m benchmarks.plan_fit            # print the fit, the residuals and the cross-validation
    python -m benchmarks.plan_fit --write    # and write src/chipwise/planner/efficiencies.json

The measurements are the GPU rows of benchmarks/plan_accuracy/published.csv whose `use` is "fit" and whose
clock counts steps alone, each as the recipe on the target that `chipwise plan` would be asked for. Their
programs are compiled once and kept in the cache; the fit then takes seconds. Least squares on the logarithm
of predicted over measured seconds, with a soft-L1 loss and a weak prior at plausible values, so that what the
rows do not tell stays where it was put. No fitted value is per model or per chip.

What was chosen by hand, and not held out of the cross-validation: the form of the model, the priors, the
constants of tiles, of L2 and of collectives. Needs scipy and the GPU's compiler; touches no accelerator.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.plan_accuracy.rows import Row, rows
from scipy import stats
from scipy.optimize import least_squares

from chipwise.chips.targets import Target
from chipwise.engine.layout import Layout, shares, usable
from chipwise.errors import RecipeError
from chipwise.planner import step_time, steps
from chipwise.planner.gpu_timing import Ideal, ideal_times, split
from chipwise.planner.links import sum_seconds
from chipwise.planner.programs import StepPrograms, step_programs

TARGET = Path(__file__).parents[1] / "src/chipwise/planner/efficiencies.json"

#: Name: (value where the rows say nothing, one standard deviation of its logarithm).
PRIORS = {
    "matmul": (0.8, 0.2),
    "convolution": (0.7, 0.3),
    "convolution_tf32": (0.4, 0.3),
    "attention": (0.5, 0.3),
    "vector": (0.9, 0.1),
    "balance_exponent": (0.3, 0.5),
    "depthwise": (0.5, 0.4),
    "memory": (0.8, 0.1),
    "passes": (0.8, 0.1),
}
FIXED = {"elementwise": 0.5, "launch_seconds": 4e-6}
"""Not fitted: no row depends on them."""

WIDER = 1.3
"""Power of the interval's factors on a chip where nothing was measured."""

UNLIKE = 3.0
"""The interval's factor on GPUs before Volta, of which no row is fitted."""


@dataclass(frozen=True)
class Sample:
    """A row, the programs of its step as ideal times with counts, and the seconds of its sum over devices."""

    row: Row
    parts: tuple[tuple[Ideal, float], ...]
    wire: float

    def residual(self, values: dict[str, float]) -> float:
        """The logarithm of predicted over measured seconds of a step."""
        total = self.wire
        for ideal, count in self.parts:
            arithmetic, memory, launch = split(ideal, values)
            total += count * float(np.sum(np.maximum(arithmetic, memory) + launch))
        return float(np.log(total / self.row.seconds))


def samples(only: Sequence[int] = ()) -> list[Sample]:
    """Every GPU row that may be fitted, or some of them by number."""
    cases: list[tuple[Target, StepPrograms]] = []
    kept: list[Row] = []
    for row in rows("fit", "GPU"):
        if row.clock != "steps" or (only and row.row not in only):
            continue
        recipe, target = row.load(), row.target
        layout = Layout.of(recipe, usable(shares(recipe, True), target.devices, True), True)
        try:
            cases.append((target, step_programs(recipe, layout, resident=False)))
            kept.append(row)
        except RecipeError as error:
            print(f"row {row.row} left out: {error}")

    def progress(done: int, total: int, name: str, left: float | None) -> None:
        print(f"{done} of {total} compiled; {left or 0:.0f} s left", flush=True)

    made = []
    for place, answers in steps.compile_steps(cases, progress=progress):
        row, (target, programs) = kept[place], cases[place]
        problem = next((a.problem for a in answers.values() if a.problem), None)
        if problem is not None:
            print(f"row {row.row} left out: {problem}")
            continue
        parts = [(ideal_times(step_time.additions(programs), target.chip), 1.0)]
        for name, answer in answers.items():
            kernels = [kernel for kernel in answer.kernels if kernel.kind != "collective"]
            count = float(programs.calls if name == "replica" else 1)
            parts.append((ideal_times(kernels, target.chip), count))
        wire = sum_seconds(4.0 * programs.size, target, programs.layout.groups)
        made.append(Sample(row, tuple(parts), wire))
    return sorted(made, key=lambda sample: sample.row.row)


def fit(train: Sequence[Sample]) -> dict[str, float]:
    """The values of `PRIORS`' names that suit `train`, with the fixed ones."""
    start = np.log([p[0] for p in PRIORS.values()])
    spread = np.array([p[1] for p in PRIORS.values()])

    def named(x: np.ndarray) -> dict[str, float]:
        return {**dict(zip(PRIORS, np.exp(x).tolist(), strict=True)), **FIXED}

    def residuals(x: np.ndarray) -> np.ndarray:
        values = named(x)
        # A line measures to about 10 % what the model can mean by it.
        return np.concatenate([[s.residual(values) / 0.1 for s in train], (x - start) / spread])

    found = [
        least_squares(residuals, start + away * spread, loss="soft_l1", f_scale=1.5, diff_step=1e-4)
        for away in (0.0, -1.0, 1.0)  # there are several valleys
    ]
    return named(min(found, key=lambda one: one.cost).x)


def left_out(data: Sequence[Sample], name: str) -> list[float]:
    """Residuals of each sample by a fit without those that share its `name`, "family" or "device"."""
    made: dict[str, dict[str, float]] = {}
    for s in data:
        group = getattr(s.row, name)
        if group not in made:
            made[group] = fit([t for t in data if getattr(t.row, name) != group])
    return [s.residual(made[getattr(s.row, name)]) for s in data]


def factors(groups: Sequence[str], residuals: Sequence[float]) -> tuple[float, float]:
    """The factors on predicted seconds between which nine of ten measured ones lie, of a group that was not
    fitted: Student's t for a new one, as far to both sides. Groups count alike, however many rows they have,
    since rows of a group err together."""
    squares: dict[str, list[float]] = {}
    for group, residual in zip(groups, residuals, strict=True):
        squares.setdefault(group, []).append(residual**2)
    spread = float(np.sqrt(np.mean([np.mean(own) for own in squares.values()])))
    size = float(stats.t.ppf(0.95, len(squares))) * spread
    return float(np.exp(-size)), float(np.exp(size))


def coverage(data: Sequence[Sample], residuals: Sequence[float], name: str) -> float:
    """Share of rows inside an interval that was made from the other groups' residuals alone."""
    groups = [getattr(s.row, name) for s in data]
    inside = []
    for own, r in zip(groups, residuals, strict=True):
        others = [(group, q) for group, q in zip(groups, residuals, strict=True) if group != own]
        low, high = factors(*zip(*others, strict=True))
        inside.append(low <= np.exp(-r) <= high)
    return float(np.mean(inside))


def summary(residuals: Sequence[float]) -> dict[str, float]:
    """Relative errors of the predicted throughput."""
    error = np.abs(np.exp(-np.asarray(residuals)) - 1)
    return {
        "rows": len(error),
        "median_error": round(float(np.median(error)), 3),
        "within_20_percent": round(float(np.mean(error <= 0.2)), 3),
        "within_50_percent": round(float(np.mean(error <= 0.5)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write efficiencies.json")
    parser.add_argument("--rows", help="these alone, such as 2,15,60")
    options = parser.parse_args()
    write = options.write
    train = samples([int(number) for number in options.rows.split(",")] if options.rows else ())
    values = fit(train)
    inside = [s.residual(values) for s in train]
    families, chips = left_out(train, "family"), left_out(train, "device")

    print("value               fitted   prior")
    for name, value in values.items():
        print(f"{name:20s}{value:.4g}   {PRIORS.get(name, ('fixed',))[0]}")
    print("\nrow  predicted / measured seconds: fit, family left out, device left out")
    for s, a, b, c in zip(train, inside, families, chips, strict=True):
        r = s.row
        ratios = " ".join(f"{np.exp(x):.2f}" for x in (a, b, c))
        print(f"{r.row:4d}  {ratios}  {r.model[:30]:30s} {r.on:17s} {' '.join(r.settings)} {r.program}")
    result = {"fit": summary(inside)}
    for name, residuals in (("family", families), ("device", chips)):
        covered = round(coverage(train, residuals, name), 3)
        result[f"{name}_left_out"] = {**summary(residuals), "coverage_90": covered}
    for name, line in result.items():
        print(name, line)
    known = factors([s.row.family for s in train], families)
    elsewhere = factors([s.row.device for s in train], chips)
    other = tuple(pick(a, b) ** WIDER for pick, a, b in zip((min, max), known, elsewhere, strict=True))
    print(f"90 % within {known[0]:.2f} to {known[1]:.2f}, elsewhere {other[0]:.2f} to {other[1]:.2f}")
    if write:
        TARGET.write_text(
            json.dumps(
                {
                    "about": "Written by benchmarks/plan_fit.py; not by hand.",
                    "date": datetime.date.today().isoformat(),
                    "values": {name: float(f"{value:.4g}") for name, value in values.items()},
                    "fixed": sorted(FIXED),
                    "interval_90": {
                        "known_chip": [round(x, 3) for x in known],
                        "other": [round(x, 3) for x in other],
                        "unlike": [round(1 / UNLIKE, 3), UNLIKE],
                    },
                    "cross_validation": result,
                    "chips": sorted({s.row.target.chip.name for s in train}),
                    "rows": [
                        {
                            "row": s.row.row,
                            "predicted_over_measured": round(float(np.exp(a)), 3),
                            "family_left_out": round(float(np.exp(b)), 3),
                            "device_left_out": round(float(np.exp(c)), 3),
                        }
                        for s, a, b, c in zip(train, inside, families, chips, strict=True)
                    ],
                },
                indent=1,
            )
            + "\n",
            encoding="utf-8",
        )
        print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
