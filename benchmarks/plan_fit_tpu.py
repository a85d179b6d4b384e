"""Fits the interval of TPU steps to published rows, only to those marked for fitting.

    python -m benchmarks.plan_fit_tpu    # writes src/chipwise/compile/allowances.json

A TPU's step is timed by its compiler, and kernels that only move data by the published speed of copies
(`compile.time_tpu`). No row is used for that time. So the differences between the predictions of
`benchmarks.plan_accuracy` for these rows and their measurements are the errors to expect. Errors of rows with
one family, source and chip are correlated, so they count as one.
"""

from __future__ import annotations

import json

import numpy as np
from benchmarks.plan_accuracy.__main__ import stored
from benchmarks.plan_accuracy.page import Prediction
from benchmarks.plan_accuracy.rows import FOLDER, rows
from benchmarks.plan_fit import factors

TARGET = FOLDER.parents[1] / "src/chipwise/compile/allowances.json"

WIDER = 1.3
"""Power of the interval's factors on a chip of which there is no row."""


def main() -> None:
    answers = stored()
    known = [r for r in rows("fit", "TPU") if "value" in answers.get(r.row, {})]
    ratios = {r.row: round(1 / Prediction(r, answers[r.row]).ratio, 3) for r in known}
    groups = [(r.family, r.origin, r.target.chip.name) for r in known]
    low, high = factors(groups, [float(np.log(ratio)) for ratio in ratios.values()])
    spans = {"known_chip": (low, high), "other": (low**WIDER, high**WIDER)}
    chips = sorted({row.target.chip.name for row in known})
    about = "Written by benchmarks/plan_fit_tpu.py; not by hand. Of the rows: measured over predicted."
    rounded = {name: [round(end, 3) for end in ends] for name, ends in spans.items()}
    found = {"about": about, "tpu": {"interval_90": rounded, "chips": chips, "rows": ratios}}
    TARGET.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{len(set(groups))} groups; nine of ten between {low:.2f} and {high:.2f}; of the rows: {ratios}")


if __name__ == "__main__":
    main()
