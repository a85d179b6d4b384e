"""Measures the cost of the trainer: `fit` against a bare loop over its step, exact against `exact=False`.

    python benchmarks/overhead.py --data DIR

`blocks=1` is the exact step as one program. Each pair alternates, five runs each, on the same steps;
`overhead.md` has medians and their ratio. A bare loop is `for ...: carry, token = program.step(carry, window,
data)` and one wait at the end: no logs, metrics, signals, checkpoints or run folder. `fit` runs with a run
folder and logs as usual.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import statistics
import tempfile
import time
from pathlib import Path

import jax

import chipwise as cw
from chipwise.run import feed
from chipwise.run.placement import Placement, lay_out
from chipwise.run.programs import Programs
from chipwise.step import window

RUNS = 5


class Bare:
    """The step of a recipe, compiled once, in a bare loop."""

    def __init__(self, recipe: cw.Recipe, exact: bool):
        machine, layout, _ = lay_out(recipe, cw.On(devices=1, exact=exact))
        self.recipe, self.placement = recipe, Placement(machine, 1)
        self.programs = Programs(recipe, layout, self.placement, resident=True)
        self.data = self.placement.put(window.flat(feed.read(recipe.task.train, None, "training")))
        windows = feed.Windows(recipe, self.placement, 0, window.window_length(recipe))
        self.window = windows.at(0)  # later steps take its last rows
        windows.close()
        self.programs.compile()

    def examples_per_second(self) -> float:
        carry, total = self.programs.state_layout.first(self.recipe), self.recipe.clock.total
        jax.block_until_ready(carry)
        before = time.perf_counter()
        for _ in range(total):
            carry, _ = self.programs.step(carry, self.window, self.data)
        jax.block_until_ready(carry)
        return total * self.recipe.batch / (time.perf_counter() - before)


def fitted(recipe: cw.Recipe) -> float:
    """Examples/s of `fit` over its training time, without evaluation and the final checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        result = cw.fit(
            dataclasses.replace(recipe),
            f"{folder}/run",
            eval_every=None,
            progress="none",
            on=cw.On(devices=1),
        )
    return recipe.clock.total * recipe.batch / result.seconds["train"]


def alternate(a, b) -> tuple[list[float], list[float]]:
    a(), b()  # warm up
    pairs = [(a(), b()) for _ in range(RUNS)]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data")
    arguments = parser.parse_args()
    recipes = {
        "digits": cw.load("digits", ["duration=2000st"]),
        "mnist": cw.load("mnist", ["duration=80st"], arguments.data),
    }
    lines = [
        "# What the trainer costs",
        "",
        f"`python benchmarks/overhead.py`; {platform.machine()} CPU, 2 cores, 1 device, 8 replicas, "
        f"JAX {jax.__version__}; {RUNS} alternating runs, median (min to max), examples/s.",
        "",
        "| recipe | this | against | this, examples/s | against, examples/s | median of ratios |",
        "|---|---|---|---|---|---|",
    ]
    for name, recipe in recipes.items():
        exact, free = Bare(recipe, True), Bare(recipe, False)
        one_block = Bare(dataclasses.replace(recipe, blocks=1), True)
        for what, against, pair in (
            ("fit", "bare loop over the same step", (lambda r=recipe: fitted(r), exact.examples_per_second)),
            ("exact", "exact=False", (exact.examples_per_second, free.examples_per_second)),
            ("blocks=1", "exact=False", (one_block.examples_per_second, free.examples_per_second)),
        ):
            a, b = alternate(*pair)
            ratio = statistics.median(x / y for x, y in zip(a, b, strict=True))
            lines.append(f"| {name} | {what} | {against} | {_spread(a)} | {_spread(b)} | {ratio:.1%} |")
            print(lines[-1], flush=True)
    (Path(__file__).parent / "overhead.md").write_text("\n".join(lines) + "\n")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


if __name__ == "__main__":
    main()
