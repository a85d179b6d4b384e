"""Does MNIST reach 99.2 % on one device and 99.4 % on eight, or is that noise?

    python benchmarks/mnist_seeds.py --data DIR [--seeds 5]

Trains the `mnist` recipe for 24 epochs with 8 replicas (batch-norm statistics over 32 examples, as on
a TPU of 8 cores) and with 1 (over 256, as on one GPU), with alternating seeds, and writes `mnist_seeds.md`.
Runs are kept in `runs/mnist_seeds` and not repeated. The number of devices is not in the table, since it does
not change a bit.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path

import jax

import chipwise as cw

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", default="runs/mnist_seeds")
    arguments = parser.parse_args()
    found: dict[int, list[dict]] = {8: [], 1: []}
    for seed in range(arguments.seeds):
        for replicas in found:
            run = Path(arguments.runs) / f"replicas{replicas}-seed{seed}"
            if not (run / "result.json").exists():
                recipe = cw.load("mnist", [f"seed={seed}", f"replicas={replicas}"], arguments.data)
                cw.fit(recipe, run, eval_every="6ep", checkpoint_every="2ep", progress="lines")
            found[replicas].append(json.loads((run / "result.json").read_text()))
            write(found)


def write(found: dict[int, list[dict]]) -> None:
    """Writes the table of the results so far."""
    lines = [
        "# MNIST, 24 epochs: test accuracy by replicas and seed",
        "",
        f"`python benchmarks/mnist_seeds.py`; {platform.machine()} CPU, 2 cores, float32, "
        f"JAX {jax.__version__}. "
        "10,000 test images, each once. Interval: 95 %, Student's t.",
        "",
        "| replicas | batch norm over | seeds | mean | interval | spread (deviation) | each |",
        "|---|---|---|---|---|---|---|",
    ]
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
    intervals = {}
    for replicas, results in found.items():
        values = [100 * r["metrics"]["eval/accuracy"] for r in results]
        if len(values) < 2:
            continue
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        half = t[len(values)] * deviation / len(values) ** 0.5
        intervals[replicas] = (mean - half, mean + half)
        each = ", ".join(f"{v:.2f}" for v in values)
        lines.append(
            f"| {replicas} | {256 // replicas} examples | {len(values)} | {mean:.3f} % | "
            f"{mean - half:.2f} to {mean + half:.2f} % | {deviation:.3f} | {each} |"
        )
    if len(intervals) == 2:
        (a, b), (c, d) = intervals.values()
        overlap = a <= d and c <= b
        lines += [
            "",
            "The intervals overlap: no difference shown between 1 and 8 replicas; "
            "a single run of either can be anywhere in this spread."
            if overlap
            else "The intervals do not overlap: the replicas make a difference.",
        ]
    (HERE / "mnist_seeds.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
