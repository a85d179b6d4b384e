"""Does `precision="f16"` with its loss scale reach the accuracy of `f32`?

    python benchmarks/half_precision.py --data DIR [--duration 4ep] [--seeds 3]

Trains `cifar10-davidnet` at a quarter of its width with both precisions and the same seeds, in turn; the rate
rises for a fifth of the run and falls for the rest. Writes `benchmarks/half_precision.md` after each pair of
runs. DIR holds CIFAR-10. Runs are kept in `runs/half_precision` and not repeated. A CPU computes float16 by
way of float32, so the seconds say nothing about a GPU. One device: the number of devices does not change a
bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from datetime import date
from pathlib import Path

import jax

import chipwise as cw
from chipwise.machine.fingerprint import this_machine
from chipwise.study.stats import Spread, difference

ROOT = Path(__file__).parents[1]
PRECISIONS = ("f32", "f16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--duration", default="4ep")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "half_precision")
    given = parser.parse_args()
    results: dict[str, list[dict]] = {precision: [] for precision in PRECISIONS}
    for seed in range(given.seeds):
        for precision in PRECISIONS:
            results[precision].append(trained(given, precision, seed))
        if seed:  # a single value has no spread
            (ROOT / "benchmarks" / "half_precision.md").write_text(page(results, given.duration))


def trained(given: argparse.Namespace, precision: str, seed: int) -> dict:
    """The `result.json` of one run."""
    run = given.runs / f"{given.duration}-{precision}-seed{seed}"
    if not (run / "result.json").exists():
        settings = ["width=16", f"precision={precision}", f"seed={seed}", f"duration={given.duration}"]
        recipe = cw.load("cifar10-davidnet", settings, data=given.data)
        rate = cw.one_cycle(0.4, warmup="20%")  # the recipe's own warm-up is longer than a short run
        recipe = dataclasses.replace(
            recipe, optimizer=cw.sgd(lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
        )
        cw.fit(recipe, run, on=cw.On(devices=1), eval_every=given.duration, progress="lines")
    return json.loads((run / "result.json").read_text())


def page(results: dict[str, list[dict]], duration: str) -> str:
    """The table as Markdown."""
    accuracies = {
        precision: [100 * result["metrics"]["eval/accuracy"] for result in of_precision]
        for precision, of_precision in results.items()
    }
    rows = []
    for precision, values in accuracies.items():
        spread, each = Spread.of(values), ", ".join(f"{value:.2f}" for value in values)
        rows.append(f"| {precision} | {spread.mean:.2f} | {spread.low:.2f} to {spread.high:.2f} | {each} |")
    gap = difference(accuracies["f16"], accuracies["f32"])
    return f"""# Accuracy in float16

`python benchmarks/half_precision.py`: `cifar10-davidnet` with `width=16`, {duration} of CIFAR-10 (JPEG copy),
a rate of 0.4 at a fifth of the run; 10,000 test images, each once. Interval of the mean: 95 %, Student's t.
{this_machine().cpu}, JAX {jax.__version__}, {date.today()}.

| precision | accuracy, % | interval | each seed |
|---|---|---|---|
{chr(10).join(rows)}

f16 less f32: {gap.value:+.2f} points (95 % interval {gap.low:+.2f} to {gap.high:+.2f}).
"""


if __name__ == "__main__":
    main()
