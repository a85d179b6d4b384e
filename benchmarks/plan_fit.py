"""Fits what a plan takes from published training throughputs, to the rows that may be fitted and no others.

    python -m benchmarks.plan_fit            # print the fit, the residuals and the cross-validation
    python -m benchmarks.plan_fit --write    # and write src/chipwise/planner/efficiencies.json

The measurements are the GPU rows of benchmarks/plan_accuracy/published.csv whose `use` is "fit", each as the
recipe on the target that `chipwise plan` would be asked for. Least squares on the logarithm of predicted over
measured seconds, with a soft-L1 loss and a weak prior at plausible values, so that what the rows do not tell
stays where it was put. No fitted value is per model or per chip.

What was chosen by hand, and not held out of the cross-validation: the form of the model, the priors, the
constants of `tiles` and `collectives`. Needs scipy; touches no accelerator.
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
from scipy.optimize import least_squares

from chipwise.engine.layout import Layout
from chipwise.errors import RecipeError
from chipwise.planner.programs import step_programs, traced_program
from chipwise.planner.roofline import Ideal, ideal_times, split
from chipwise.planner.timing import all_reduce_seconds

TARGET = Path(__file__).parents[1] / "src/chipwise/planner/efficiencies.json"

#: Name: (value where the lines say nothing, one standard deviation of its logarithm).
PRIORS = {
    "matmul": (0.8, 0.2),
    "convolution": (0.7, 0.3),
    "convolution_tf32": (0.4, 0.3),
    "vector": (0.9, 0.1),
    "balance_exponent": (0.3, 0.5),
    "depthwise": (0.5, 0.4),
    "memory": (0.8, 0.1),
    "eager": (1.3, 0.2),
    "tuned": (0.8, 0.2),
    "exposed": (0.3, 0.5),
}
FIXED = {"elementwise": 0.5, "launch_seconds": 4e-6}
"""Not fitted: no line of the fit depends on them."""

WIDER = 1.3
"""Power of the interval's factors where nothing was measured: another chip, or a step of small kernels."""

UNLIKE = 3.0
"""The interval's factor on CPUs and on GPUs before Volta, of which no line is fitted. DavidNet on two cores
took 0.36 to 0.8 of what is predicted there, ResNet-164 on a P100 and a K80 1.8 and 2.8 times it."""

SOFTWARE = {"xla": "compiled", "library": "eager", "kernels": "tuned"}
"""What `split` calls a row's `program`."""


@dataclass(frozen=True)
class Sample:
    """A row, the programs of its step as ideal times with counts, and the seconds of its sum over devices."""

    row: Row
    parts: tuple[tuple[Ideal, float], ...]
    wire: float

    def predicted(self, values: dict[str, float]) -> float:
        """Seconds of a step."""
        total = self.wire
        for ideal, count in self.parts:
            arithmetic, memory, launch = split(ideal, values, SOFTWARE[self.row.program])
            total += count * float(np.sum(np.maximum(arithmetic, memory) + launch))
        return total

    def launch_share(self, values: dict[str, float]) -> float:
        """Of the predicted step."""
        software = SOFTWARE[self.row.program]
        launch = sum(n * float(np.sum(split(ideal, values, software)[2])) for ideal, n in self.parts)
        return launch / self.predicted(values)

    def residual(self, values: dict[str, float]) -> float:
        return float(np.log(self.predicted(values) / self.row.seconds))


def samples() -> list[Sample]:
    """Every GPU row that may be fitted and that this version has a precision for."""
    made = []
    for row in rows("fit", "GPU"):
        try:
            recipe = row.load()
        except RecipeError as error:
            print(f"row {row.row} left out: {error}")
            continue
        layout, chip = Layout(recipe.batch, recipe.replicas, row.target.devices, True), row.target.chip
        programs = step_programs(recipe, layout, resident=False)
        parts = [
            (ideal_times(traced_program(program, "cuda"), chip, recipe.precision), count)
            for program, count in ((programs.replica, programs.calls), (programs.update, 1))
        ]
        wire = all_reduce_seconds(4.0 * programs.size, programs.layout.devices, chip)
        made.append(Sample(row, tuple(parts), wire))
    return made


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

    return named(least_squares(residuals, start, loss="soft_l1", f_scale=1.5, diff_step=1e-4).x)


def left_out(data: Sequence[Sample], name: str) -> list[float]:
    """Residuals of each sample by a fit without those that share its `name`, "family" or "device"."""
    made: dict[str, dict[str, float]] = {}
    for s in data:
        group = getattr(s.row, name)
        if group not in made:
            made[group] = fit([t for t in data if getattr(t.row, name) != group])
    return [s.residual(made[getattr(s.row, name)]) for s in data]


def factor(residuals: Sequence[float]) -> float:
    """The factor, up or down, within which 90 % of measured times lie: the quantile of the sizes of the
    logarithmic residuals, one rank further out as so few lines ask for."""
    sizes = np.sort(np.abs(residuals))
    rank = min(len(sizes), int(np.ceil(0.9 * (len(sizes) + 1))))
    return float(np.exp(sizes[rank - 1]))


def coverage(data: Sequence[Sample], residuals: Sequence[float], name: str) -> float:
    """Share of lines inside an interval that was made from the other groups' residuals alone."""
    inside = []
    for s, r in zip(data, residuals, strict=True):
        others = [
            q for t, q in zip(data, residuals, strict=True) if getattr(t.row, name) != getattr(s.row, name)
        ]
        inside.append(abs(r) <= np.log(factor(others)))
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
    write = parser.parse_args().write
    train = samples()
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
    known = factor(families)
    other = max(known, factor(chips)) ** WIDER
    launches = max(s.launch_share(values) for s in train)
    print(
        f"90 % within a factor {known:.2f}, elsewhere {other:.2f}; largest share of launches {launches:.3f}"
    )
    if write:
        TARGET.write_text(
            json.dumps(
                {
                    "about": "Written by benchmarks/plan_fit.py; not by hand.",
                    "date": datetime.date.today().isoformat(),
                    "values": {name: float(f"{value:.4g}") for name, value in values.items()},
                    "fixed": sorted(FIXED),
                    "interval_90": {
                        "known_chip": round(known, 3),
                        "other": round(other, 3),
                        "unlike": UNLIKE,
                    },
                    "largest_launch_share": round(launches, 3),
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
