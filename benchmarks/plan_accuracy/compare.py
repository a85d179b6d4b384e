"""From the programs of a row to a predicted throughput, by the TPU's compiler or by the GPU's model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chipwise.chips.catalogue import peak_flops_per_device
from chipwise.chips.targets import parse
from chipwise.planner.operations import trace
from chipwise.planner.roofline import efficiencies, time_on
from chipwise.planner.timing import TPU_FACTORS, all_reduce_seconds

from .rows import Row, chip_of

ONE_DEVICE = {
    "v2": "v2-1", "v3": "v3-1", "v4": "v4-8", "v5e": "v5e-1", "v5p": "v5p-8", "v6e": "v6e-1",
    "tpu7x": "tpu7x-1",
}  # fmt: skip
"""The target for whose first device a TPU row's programs are compiled."""


@dataclass(frozen=True)
class Prediction:
    """Examples/s of a line of `published.csv`, global, and the interval; `None` where a program could not be
    timed, for `problem`. `how`: "compiled"; "family left out" and "chip left out" for efficiencies fitted
    without the rows of the same family or chip; "not fitted" for ones that never saw the row."""

    line: int
    measured: float
    value: float | None
    low: float | None = None
    high: float | None = None
    how: str = "compiled"
    parts: dict[str, float] | None = None  # seconds of a step
    problem: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.value is None else self.value / self.measured

    @property
    def inside(self) -> bool | None:
        if self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high

    def as_json(self) -> dict[str, Any]:
        return {name: _short(value) for name, value in asdict(self).items() if value not in (None, "")}


def _short(value):
    if isinstance(value, dict):
        return {name: _short(v) for name, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def is_tpu(row: Row) -> bool:
    return chip_of(row.chip).kind == "TPU"


def communication(row: Row) -> tuple[float, float]:
    """Seconds of a step's sums over devices: those beside the computation, and those after it."""
    sums = {True: 0.0, False: 0.0}
    for reduce in row.reduces:
        seconds = all_reduce_seconds(reduce.bytes, reduce.devices, chip_of(row.chip))
        sums[reduce.hidden] += reduce.count * seconds
    return sums[True], sums[False]


def step_seconds(row: Row, seconds: Sequence[float], exposed: float = 0.0) -> dict[str, float]:
    """A step by part, from the seconds of one run of each of `row.parts`. Of a sum that runs beside the
    computation counts what outlasts it, and at least the share `exposed`."""
    parts = {part.name: part.count * s for part, s in zip(row.parts, seconds, strict=True)}
    beside, after = communication(row)
    left = max(exposed * beside, beside - sum(parts.values()))
    return {**parts, "sums over devices": after + left}


def predicted(row: Row, parts: dict[str, float], factors: tuple[float, float], how: str) -> Prediction:
    """*Arguments:* `factors`: on a step's seconds, between which nine of ten measurements should lie."""
    value = row.examples_per_step / sum(parts.values())
    return Prediction(row.line, row.measured, value, value / factors[1], value / factors[0], how, parts)


# ---- TPUs: nothing is fitted


def tpu(
    rows: Iterable[Row], cache: Path | None = None, progress: Callable[[int, int, str], None] | None = None
) -> list[Prediction]:
    """Each part compiled for one device; seconds are cycles at the chip's clock."""
    from chipwise.planner.compiler import Request, compile_all, export_program
    from chipwise.planner.steps import device_speeds

    rows = list(rows)
    requests = []
    for row in rows:
        topology = parse(ONE_DEVICE[chip_of(row.chip).names[0]]).topology_arguments()
        for part in row.parts:
            body, speeds = export_program(*part.program()), device_speeds(chip_of(row.chip))
            requests.append(Request(part.name, topology, body, (), *speeds))
    facts = iter(compile_all(requests, cache_dir=cache, progress=progress))
    return [_from_facts(row, [next(facts) for _ in row.parts]) for row in rows]


def kernel_seconds(row: Row) -> float:
    """Of a step's attention kernels, where the layer's program leaves them out."""
    if not row.kernel_flops:
        return 0.0
    peak = peak_flops_per_device(chip_of(row.chip), row.precision)
    assert peak is not None
    return row.layers * row.accumulation * row.kernel_flops / peak


def _from_facts(row: Row, facts) -> Prediction:
    for part, fact in zip(row.parts, facts, strict=True):
        if fact.problem is not None:
            reason = str(fact.problem)
            return Prediction(row.line, row.measured, None, problem=f"{part.name}: {reason}")
    parts = step_seconds(row, [fact.seconds for fact in facts])
    parts["attention at peak"] = kernel_seconds(row)
    return predicted(row, parts, TPU_FACTORS, "compiled")


# ---- GPUs: by efficiencies that have not seen the row


def gpu(row: Row) -> list[Prediction]:
    """Two for a row of the fit, each by a fit to other rows, as `benchmarks/plan_fit.py` left them in
    `efficiencies.json`; one for a row that the fit never sees."""
    fitted = efficiencies()
    widths = fitted["interval_90"]
    for line in fitted["rows"]:
        if line["line"] == row.line:
            made = []
            for name, width in (("family", widths["known_chip"]), ("chip", widths["other"])):
                parts = {"step": row.examples_per_step / row.measured * line[f"{name}_left_out"]}
                made.append(predicted(row, parts, (1 / width, width), f"{name} left out"))
            return made
    software = "tuned" if row.kernel else row.software
    timed = []
    for part in row.parts:
        function, specs = part.program()
        timed.append(time_on(trace(function, *specs), chip_of(row.chip), row.precision, software=software))
    parts = step_seconds(row, [t.seconds for t in timed], exposed=fitted["values"]["exposed"])
    factors = (timed[0].low / timed[0].seconds, timed[0].high / timed[0].seconds)
    return [predicted(row, parts, factors, "not fitted")]


def summary(predictions: Iterable[Prediction]) -> dict[str, float]:
    """Of those with a value: how many, the median of predicted over measured, how far off they are, either
    way, in the median and in nine of ten, and the share inside the stated interval. Errors are factors less
    one: 0.25 is a quarter too fast, or slow by as much."""
    known = [p for p in predictions if p.ratio is not None]
    if not known:
        return {"rows": 0}
    ratios = [p.ratio for p in known if p.ratio is not None]
    off = sorted(max(r, 1 / r) - 1 for r in ratios)
    inside = [p.inside for p in known if p.inside is not None]
    return {
        "rows": len(known),
        "median ratio": statistics.median(ratios),
        "median error": statistics.median(off),
        "90th percentile error": off[min(len(off) - 1, int(0.9 * len(off)))],
        **({"inside": sum(inside) / len(inside)} if inside else {}),
    }
