"""`plan_accuracy.md` and `plan_accuracy.svg` from the predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .compare import Prediction, is_tpu, summary
from .rows import Row

INTRODUCTION = """# What `plan` predicts, against what was published

`python -m benchmarks.plan_accuracy` writes this page. Each usable line of `published.csv` (training
throughputs with their sources, none measured here) is rebuilt as the program that one device ran, by
`rows.py`, and timed as `chipwise plan` times a recipe. Throughputs are global, in images or sequences a
second.

**TPU rows** are compiled by the TPU's own compiler for one absent device; the time is its cycles at the
chip's clock, plus sums over devices by the catalogue's interconnect. Nothing is fitted to them. Sums of
weights and gradients that the source overlaps count only as far as they outlast the computation.

**GPU rows** are timed operation by operation with efficiencies that `benchmarks/plan_fit.py` fits to
such rows; what stands here is by a fit that left out the row's family of models, or its chip. Rows
marked "not fitted" are never seen by the fit.

"Inside" says whether the measurement lies in the stated 90 % interval. Rows whose clock is "wall"
include evaluation, input or start-up, so that a right prediction is above them. In rows marked "kernel"
the source ran hand-written attention kernels. On GPUs the model takes attention for one fused operation.
The TPU's compiler states no cycles for such kernels: their products are added at the chip's peak, as if
the rest of the kernel were free (`flash.py`; `--attention blocks` compiles attention in plain JAX
instead, which bounds it from above). Large sharded models are timed as one layer and the head, times
their number, on one device's part of the batch; memory is not checked.
"""


def write(folder: Path, rows: Sequence[Row], predictions: Sequence[Prediction]) -> None:
    """Writes both files."""
    by_line = {row.line: row for row in rows}
    tpus = [p for p in predictions if is_tpu(by_line[p.line])]
    gpus = [p for p in predictions if not is_tpu(by_line[p.line])]
    lines = [INTRODUCTION, "## In short", "", *_summaries(by_line, tpus, gpus), ""]
    if any(p.value for p in predictions):
        lines += ["![predicted against measured](plan_accuracy.svg)", ""]
        scatter(folder / "plan_accuracy.svg", by_line, predictions)
    for title, some in (("TPU rows", tpus), ("GPU rows", gpus)):
        lines += [f"## {title}", "", *(_table(by_line, some) if some else ["Not run yet."]), ""]
    lines += ["## Rows that cannot be used", "", "| line | row | chip | reason |", "|---|---|---|---|"]
    lines += [f"| {r.line} | {r.model} | {r.chip} | {r.why_not} |" for r in rows if not r.usable]
    text = "\n".join(lines) + "\n"
    (folder / "plan_accuracy.md").write_text(text, encoding="utf-8")


def _summaries(by_line, tpus, gpus) -> list[str]:
    def pick(some, test):
        return [p for p in some if test(by_line[p.line], p)]

    groups = [
        ("TPU, all", tpus),
        ("TPU, steps alone, no kernels", pick(tpus, lambda r, p: r.clock == "steps" and not r.kernel)),
        ("TPU, steps alone, kernels", pick(tpus, lambda r, p: r.clock == "steps" and r.kernel)),
        ("TPU, wall clock", pick(tpus, lambda r, p: r.clock == "wall")),
        ("GPU, family left out", pick(gpus, lambda r, p: p.how == "family left out")),
        ("GPU, chip left out", pick(gpus, lambda r, p: p.how == "chip left out")),
        ("GPU, not fitted", pick(gpus, lambda r, p: p.how == "not fitted")),
    ]
    lines = [
        "| rows | number | median predicted / measured | median error | 90th percentile of errors | inside |",
        "|---|---|---|---|---|---|",
    ]
    for name, some in groups:
        s = summary(some)
        if s["rows"]:
            inside = f"{s['inside']:.0%}" if "inside" in s else "-"
            lines.append(
                f"| {name} | {s['rows']} | {s['median ratio']:.2f} | {s['median error']:.0%} "
                f"| {s['90th percentile error']:.0%} | {inside} |"
            )
    return lines


def _table(by_line, predictions) -> list[str]:
    lines = [
        "| line | row: model, devices x micro-batch x accumulation | chip | precision | measured | predicted "
        "| predicted / measured | interval | inside | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for p in predictions:
        row = by_line[p.line]
        notes = [p.how] if p.how != "compiled" else []
        notes += [word for word, holds in (("wall", row.clock == "wall"), ("kernel", row.kernel)) if holds]
        start = f"| {p.line} | {row.label} | {row.chip} | {row.precision} | {p.measured:,.4g} |"
        if p.value is None or p.low is None or p.high is None:
            lines.append(f"{start} - | - | - | - | {'; '.join([*notes, p.problem])} |")
            continue
        lines.append(
            f"{start} {p.value:,.4g} | {p.ratio:.2f} | {p.low:,.4g} to {p.high:,.4g} "
            f"| {'yes' if p.inside else 'no'} | {'; '.join(notes)} |"
        )
    return lines


def scatter(path: Path, by_line: dict[int, Row], predictions: Sequence[Prediction]) -> None:
    """Predicted against measured on logarithmic axes; lines at half and twice."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "plan_accuracy"  # the same file for the same numbers
    figure, axes = plt.subplots(figsize=(6.4, 6.0), layout="constrained")
    shown = [p for p in predictions if p.value is not None and p.how != "chip left out"]
    for label, colour, test in (
        ("TPU, steps alone", "#0072b2", lambda r: is_tpu(r) and r.clock == "steps"),
        ("TPU, wall clock", "#56b4e9", lambda r: is_tpu(r) and r.clock == "wall"),
        ("GPU, steps alone, cross-validated", "#d55e00", lambda r: not is_tpu(r) and r.clock == "steps"),
        ("GPU, wall clock", "#e69f00", lambda r: not is_tpu(r) and r.clock == "wall"),
    ):
        some = [p for p in shown if test(by_line[p.line])]
        if some:
            points = np.array([(p.measured, p.value) for p in some], dtype=float).T
            axes.scatter(points[0], points[1], s=22, color=colour, alpha=0.8, label=label, linewidths=0)
    ends = [min(p.measured for p in shown) / 2, max(p.measured for p in shown) * 2]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (0.5, 2.0):
        axes.plot(ends, [e * factor for e in ends], color="grey", linewidth=0.6, linestyle="--")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set(xlabel="measured, images or sequences a second", ylabel="predicted")
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
