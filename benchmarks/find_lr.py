"""Is the rate that `chipwise find-lr` suggests a good one? Against a grid of rates over the same budget.

    python benchmarks/find_lr.py --data DIR

DIR holds mnist/ and cifar10-jpeg/ (or another form of CIFAR-10). About ten minutes on two idle CPU cores.

For each task it runs one range test. Then the recipe is trained at each of 11 peak rates, factors of 2 apart,
for as many steps as the test, with its schedule scaled to that length. The best of the grid has the lowest
loss on held-out examples, as the mean over seeds. `find_lr.md` has all results. The suggestion should be
within a factor 3 of the best.

The tasks are short and small enough for two cores, with a smaller batch than the recipes. The running
statistics of `mnist` average over some hundreds of steps (momentum 0.99). In runs this short an evaluation
would depend on their initial values, so their momentum is 0.9 here.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

import chipwise as cw
from chipwise.base.files import replace_file
from chipwise.data.sources import take
from chipwise.run.on import On
from chipwise.study.find_lr import find_lr

HERE = Path(__file__).parent
WITHIN = 3.0
HELD_OUT = 1000


@dataclass(frozen=True)
class Case:
    """A recipe with settings, the steps of its test and of each run of the grid, and the grid: 11 rates,
    factors of two apart, from `lowest`, each with so many `seeds`."""

    recipe: str
    settings: tuple[str, ...]
    steps: int
    lowest: float
    seeds: int

    @property
    def rates(self) -> list[float]:
        return [self.lowest * 2**i for i in range(11)]


CASES = (
    Case("digits", (), 100, 0.002, 3),
    Case("cifar10-davidnet", ("width=16", "precision=f32", "batch=64", "replicas=4"), 100, 0.002, 1),
    Case("mnist", ("batch=64", "replicas=4", "bn_momentum=0.9"), 100, 0.00025, 3),
    Case("mnist", ("batch=64", "replicas=4", "bn_momentum=0.9"), 400, 0.00025, 2),
)


def loaded(case: Case, data: str | None) -> cw.Recipe:
    recipe = cw.load(case.recipe, case.settings, None if case.recipe == "digits" else data)
    held_out = recipe.task.eval
    assert held_out is not None
    some = np.linspace(0, len(held_out) - 1, min(HELD_OUT, len(held_out))).astype(np.int32)
    columns = {name: np.asarray(column) for name, column in take(held_out, some).items()}
    return dataclasses.replace(recipe, task=dataclasses.replace(recipe.task, eval=cw.Arrays(**columns)))


def trained(recipe: cw.Recipe, rate: float, seed: int) -> tuple[float, float]:
    """Loss and accuracy on the held-out examples, after training with `rate` as the schedule's peak."""
    lr = recipe.optimizer.hyper["lr"].with_peak(rate)
    recipe = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, lr=lr), seed=seed)
    with cw.Stepper(recipe, on=cw.On(devices=1)) as stepper:
        while stepper.done < stepper.total:
            stepper.step()
        found = stepper.evaluate()
    return found["loss"], found["accuracy"]


def measured(case: Case, data: str | None) -> tuple[list[str], list[str]]:
    """The row of the summary, and the section with the grid."""
    recipe = loaded(case, data)
    of = ""
    if case.recipe.startswith("cifar10") and (note := cw.datasets.cifar10(data).note):
        of = f" of the {note}"
    began = time.perf_counter()
    found = find_lr(recipe, steps=case.steps, on=On(devices=1))
    seconds = time.perf_counter() - began
    print(f"{case.recipe}: suggestion {found.suggestion:.3g} in {seconds:.0f} s", flush=True)
    short = cw.transfer(recipe, duration=f"{case.steps}st").recipe
    grid: dict[float, tuple[float, float]] = {}
    began = time.perf_counter()
    for rate in case.rates:
        runs = [trained(short, rate, seed) for seed in range(case.seeds)]
        loss, accuracy = (statistics.fmean(column) for column in zip(*runs, strict=True))
        grid[rate] = loss, accuracy
        print(f"  {rate:<8.3g} {loss:.4f} {accuracy:.4f}", flush=True)
    spent = time.perf_counter() - began
    best = min(grid, key=lambda rate: grid[rate][0] if np.isfinite(grid[rate][0]) else np.inf)
    factor = max(found.suggestion / best, best / found.suggestion)
    nearest = min(grid, key=lambda rate: abs(np.log(rate / found.suggestion)))
    verdict = "yes" if factor <= WITHIN else "no"
    name = f"`{' '.join([case.recipe, *(f'--set {s}' for s in case.settings)])}`"
    row = [
        name, str(case.steps), f"{found.suggestion:.3g}", f"{best:.3g}", f"{factor:.2f}", verdict,
        f"{found.last_stable:.2g}",
        f"{grid[nearest][0]:.3f}", f"{grid[best][0]:.3f}", f"{seconds:.0f}", f"{spent:.0f}",
    ]  # fmt: skip
    lines = [
        f"## {recipe.name}, {case.steps} steps",
        "",
        f"{name}, batch {recipe.batch}, {case.steps} steps, {recipe.optimizer!r}; the sweep: "
        f"{found.stopped or 'went to its end.'} Grid, mean of {case.seeds} "
        f"seed{'s' * (case.seeds > 1)}, {len(recipe.task.eval)} held-out examples{of}:",
        "",
        "| peak rate | loss | accuracy |",
        "|---|---|---|",
        *(f"| {rate:.3g} | {loss:.4f} | {accuracy:.2%} |" for rate, (loss, accuracy) in grid.items()),
        "",
    ]
    return row, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", metavar="DIR", help="folder that holds mnist/ and cifar10-jpeg/")
    data = parser.parse_args().data
    with tempfile.TemporaryDirectory() as cache:  # rates and seeds share their programs
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        made = [measured(case, data) for case in CASES]
    head = [
        "# The learning-rate finder against a grid",
        "",
        f"`python benchmarks/find_lr.py --data DIR`; {platform.machine()} CPU, {os.cpu_count()} cores, JAX "
        f"{jax.__version__}, chipwise {cw.__version__}. How a curve is read: `docs/find.md`.",
        "",
        f"The suggestion lies within a factor {WITHIN:g} of the best rate of the grid for "
        f"{sum(row[5] == 'yes' for row, _ in made)} of {len(made)} cases. The losses are those of the grid "
        "at the rate nearest to the suggestion, and at its best. Seconds: the sweep with its compilation, "
        "and the whole grid.",
        "",
        "| recipe | steps | suggestion | best of the grid | factor | within 3 | "
        "last stable | loss near the suggestion | loss at the best | s, sweep | s, grid |",
        "|---" * 11 + "|",
        *(f"| {' | '.join(row)} |" for row, _ in made),
        "",
    ]
    text = "\n".join([*head, *(line for _, lines in made for line in lines)])
    replace_file(HERE / "find_lr.md", text, "page-unwritable")


if __name__ == "__main__":
    main()
