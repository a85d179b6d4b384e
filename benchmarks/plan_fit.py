"""Fits the efficiencies of plans to published training throughputs, only to rows marked for fitting.

    python -m benchmarks.plan_fit            # print the fit, the residuals and the cross-validation
    python -m benchmarks.plan_fit --write    # and write src/chipwise/compile/efficiencies.json

The measurements are the GPU rows of benchmarks/plan_accuracy/published.csv whose `use` is "fit" and whose
clock counts only steps, each with its recipe and target. Their programs are compiled once and cached; then
the fit takes seconds. It is a least-squares fit of the logarithm of predicted over measured seconds, with a
soft-L1 loss and a weak prior at plausible values, so that values without evidence in the rows stay there. No
fitted value is per model or per chip.

Chosen by hand, and not covered by the cross-validation: the form of the model, the priors, the constants of
tiles, of L2 and of collectives. Needs scipy and the GPU's compiler, but no accelerator.
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

from chipwise.base.errors import RecipeError
from chipwise.chips.targets import Target
from chipwise.compile.time_gpu import Ideal, ideal_times, split
from chipwise.compile.time_links import sum_seconds
from chipwise.planner import compile_step, time_step
from chipwise.planner.tracing import training_step
from chipwise.step.blueprint import Blueprint
from chipwise.step.layout import Layout, usable_devices

TARGET = Path(__file__).parents[1] / "src/chipwise/compile/efficiencies.json"

#: Name: (prior value, standard deviation of its logarithm).
PRIORS = {
    "matmul": (0.9, 0.1),
    "convolution": (0.7, 0.3),
    "convolution_tf32": (0.5, 0.3),
    "attention": (0.6, 0.3),
    "vector": (0.9, 0.1),
    "winograd": (1.3, 0.25),
    "depthwise": (0.1, 1.0),
    "elementwise": (0.6, 0.3),
    "memory": (0.8, 0.1),
    "passes": (0.8, 0.1),
}
FIXED = {"launch_seconds": 2e-6}
"""Not fitted, for no row depends on it: a kernel that moves 4 MB within a V100's L2 took 2.9 us, and 3.8 with
the gap before the next one (https://developer.nvidia.com/blog/cuda-graphs), where the bytes take 2."""

TOLD = {"xla": 0.1, "kernels": 0.2, "library": 0.2}
"""How far the logarithm of a line lies, by chance, from what the model can mean by it, by whose kernels were
measured: a plan times XLA's."""


@dataclass(frozen=True)
class Sample:
    """A row, the kernels of its step as ideal times, and the seconds of its sum over devices."""

    row: Row
    ideal: Ideal
    wire: float

    def group(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of its row's family, source and chip generation that are in `names`."""
        chip = self.row.target.chip
        every = {"family": self.row.family, "origin": self.row.origin, "generation": chip.compute_capability}
        return tuple(str(every[name]) for name in names)

    def residual(self, values: dict[str, float]) -> float:
        """The logarithm of predicted over measured seconds of a step."""
        arithmetic, memory, launch = split(self.ideal, values)
        total = self.wire + float(np.sum(np.maximum(arithmetic, memory) + launch))
        return float(np.log(total / self.row.seconds))


def samples(only: Sequence[int] = ()) -> list[Sample]:
    """All GPU rows for fitting, or some of them by number."""
    cases: list[tuple[Target, Blueprint]] = []
    kept: list[Row] = []
    for row in rows("fit", "GPU"):
        if row.clock != "steps" or (only and row.row not in only):
            continue
        recipe, target = row.load(), row.target
        layout = Layout.of(recipe, usable_devices(recipe, target.devices))
        try:
            cases.append((target, training_step(recipe, layout, resident=False)))
            kept.append(row)
        except RecipeError as error:
            print(f"row {row.row} left out: {error}")

    def progress(done: int, total: int, name: str, left: float | None) -> None:
        print(f"{done} of {total} compiled; {left or 0:.0f} s left", flush=True)

    made = []
    for place, answers in compile_step.compile_steps(cases, progress=progress):
        row, (target, programs) = kept[place], cases[place]
        problem = next((a.problem for a in answers.values() if a.problem), None)
        if problem is not None:
            print(f"row {row.row} left out: {problem}")
            continue
        kernels = time_step.additions(programs)
        for name, answer in answers.items():
            runs = programs.calls if name == "replica" else 1
            kernels += [k.times(runs) for k in answer.kernels if k.kind != "collective"]
        wire = sum_seconds(4.0 * programs.size, target, programs.layout.groups)
        made.append(Sample(row, ideal_times(kernels, target.chip), wire))
    return sorted(made, key=lambda sample: sample.row.row)


def fit(train: Sequence[Sample]) -> dict[str, float]:
    """The values fitted to `train`, together with the fixed ones."""
    start = np.log([p[0] for p in PRIORS.values()])
    spread = np.array([p[1] for p in PRIORS.values()])

    def named(x: np.ndarray) -> dict[str, float]:
        return {**dict(zip(PRIORS, np.exp(x).tolist(), strict=True)), **FIXED}

    def residuals(x: np.ndarray) -> np.ndarray:
        values = named(x)
        told = [s.residual(values) / TOLD[s.row.program] for s in train]
        return np.concatenate([told, (x - start) / spread])

    return named(least_squares(residuals, start, loss="soft_l1", f_scale=1.5, diff_step=1e-4).x)


LEFT_OUT = {"known_chip": ("family", "origin"), "other": ("family", "origin", "generation")}
"""What a row shares with none of those that its prediction is fitted to, by the interval that comes of it."""


def left_out(data: Sequence[Sample], names: Sequence[str]) -> list[float]:
    """The residual of each sample by a fit without the samples that share any of its `names`."""
    made: dict[tuple[str, ...], dict[str, float]] = {}
    for s in data:
        own = s.group(names)
        if own not in made:
            others = (t for t in data if all(a != b for a, b in zip(own, t.group(names), strict=True)))
            made[own] = fit(list(others))
    return [s.residual(made[s.group(names)]) for s in data]


def factors(groups: Sequence[tuple[str, ...]], residuals: Sequence[float]) -> tuple[float, float]:
    """The factors on predicted seconds between which nine of ten measurements of a new group lie: a symmetric
    interval by Student's t. All groups have equal weight, since errors within a group are correlated."""
    squares: dict[tuple[str, ...], list[float]] = {}
    for group, residual in zip(groups, residuals, strict=True):
        squares.setdefault(group, []).append(residual**2)
    spread = float(np.sqrt(np.mean([np.mean(own) for own in squares.values()])))
    size = float(stats.t.ppf(0.95, len(squares))) * spread
    return float(np.exp(-size)), float(np.exp(size))


def coverage(groups: Sequence[tuple[str, ...]], residuals: Sequence[float]) -> float:
    """The share of rows inside an interval from the residuals of the other groups."""
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
    apart = {kind: left_out(train, names) for kind, names in LEFT_OUT.items()}

    print("value               fitted   prior")
    for name, value in values.items():
        print(f"{name:20s}{value:.4g}   {PRIORS.get(name, ('fixed',))[0]}")
    print("\nrow  predicted / measured seconds: fit; family and source left out; generation too")
    for s, *found in zip(train, inside, *apart.values(), strict=True):
        r, ratios = s.row, " ".join(f"{np.exp(x):.2f}" for x in found)
        print(f"{r.row:4d}  {ratios}  {r.model[:30]:30s} {r.on:17s} {' '.join(r.settings)} {r.program}")
    # Rows of a family from one source err together, on whichever chips, and count as one.
    groups = [s.group(LEFT_OUT["known_chip"]) for s in train]
    intervals = {kind: factors(groups, residuals) for kind, residuals in apart.items()}
    lows, highs = zip(*intervals.values(), strict=True)
    intervals["other"] = min(lows), max(highs)  # never narrower if less is known
    result = {"fit": summary(inside)}
    for kind, residuals in apart.items():
        covered = round(coverage(groups, residuals), 3)
        result[kind] = {**summary(residuals), "coverage_90": covered}
    for name, line in result.items():
        print(name, line, *(f"{x:.2f}" for x in intervals.get(name, ())))
    if write:
        document = {
            "about": "Written by benchmarks/plan_fit.py; not by hand.",
            "date": datetime.date.today().isoformat(),
            "values": {name: float(f"{value:.4g}") for name, value in values.items()},
            "fixed": sorted(FIXED),
            "interval_90": {kind: [round(x, 3) for x in pair] for kind, pair in intervals.items()},
            "left_out": LEFT_OUT,
            "cross_validation": result,
            "generations": sorted({str(s.row.target.chip.compute_capability) for s in train}),
            "rows": [
                {"row": s.row.row, **{name: round(float(np.exp(x)), 3) for name, x in found.items()}}
                for i, s in enumerate(train)
                for found in [{"fit": inside[i], **{kind: r[i] for kind, r in apart.items()}}]
            ],
        }
        TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
