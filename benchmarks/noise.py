"""The law of the critical batch against measurement: steps to a loss at six batches, predicted from one run.

    python benchmarks/noise.py digits 16,32,128,256,512,1024 >> benchmarks/noise.md
    python benchmarks/noise.py mnist 32,64,128,512,1024,2048 --data DIR --set duration=2ep \\
        --set bn_momentum=0.9

Each batch has the settings that `chipwise transfer` gives it, and a run whose length follows from the law, so
that schedules keep their form. The goal is the loss that the recipe's own batch has after two thirds of its
steps, in the mean of the seeds. Steps do not depend on the machine's speed, so others may use it meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

import chipwise as cw
from chipwise.engine.stored import read_run
from chipwise.recipe.settings import load
from chipwise.study.critical_batch import REACH, CriticalBatch, of_rows
from chipwise.study.goal import Goal

EVALUATIONS = 60  # of a run
SHARE = 2 / 3  # of the base's steps after which the goal is set
METRIC = "eval/loss"


def rows(recipe: cw.Recipe, seed: int, noise: bool = False) -> list[dict]:
    """The rows of a run of the recipe."""
    each = f"{max(recipe.clock.total // EVALUATIONS, 1)}st"
    with TemporaryDirectory() as folder:
        on = cw.On(devices=1, noise=noise)
        cw.fit(
            dataclasses.replace(recipe, seed=seed),
            folder,
            on=on,
            progress="none",
            eval_every=each,
            log_every=each,
        )
        return read_run(Path(folder)).rows


def reached(made: list[dict], goal: Goal) -> int | None:
    """The first step whose evaluation reached the goal."""
    return next((row["step"] for row in made if goal.reached(row.get(METRIC))), None)


def moved(recipe: cw.Recipe, law: CriticalBatch, batch: int) -> cw.Recipe:
    """The recipe at another batch, as long in proportion as the law says."""
    length = round(recipe.clock.total * law.steps(batch).steps / law.step)
    replicas = max(recipe.replicas * batch // recipe.batch, 1)  # batch norm over as many examples as before
    return recipe.transfer(batch=batch, replicas=replicas, duration=f"{length}st")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("batches", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--data")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    recipe = load(given.recipe, given.set, given.data, False)
    own = [rows(recipe, seed, noise=True) for seed in range(given.seeds)]
    at = SHARE * recipe.clock.total
    values = [next(row[METRIC] for row in made if METRIC in row and row["step"] >= at) for made in own]
    goal = Goal(METRIC, round(statistics.fmean(values), 4))
    laws = [of_rows(recipe.name, made, recipe.batch, goal) for made in own]
    law = sorted(laws, key=lambda one: one.step)[len(laws) // 2]
    steps = ", ".join(str(one.step) for one in laws)
    settings = "".join(f", {one}" for one in given.set)
    print(
        f"\n## {recipe.name}{settings}\n\nBatch {recipe.batch}, {recipe.clock.total} steps; {goal} reached at"
    )
    print(f"{steps}; critical batch {law.examples:.0f}. JAX {jax.__version__}, CPU.\n")
    columns = "predicted | measured, each seed | predicted / measured | inside | as many examples / measured"
    print(f"| batch | {columns} |")
    print("|---|---|---|---|---|---|")
    for batch in given.batches:
        said = law.steps(batch)
        made = [reached(rows(moved(recipe, law, batch), seed), goal) for seed in range(given.seeds)]
        found = [step for step in made if step is not None]
        median = statistics.median(found) if found else None
        ratio = f"{said.steps / median:.2f}" if median else "-"
        inside = f"{sum(said.low <= step <= said.high for step in found)} of {given.seeds}"
        shown = ", ".join("not" if step is None else str(step) for step in made)
        naive = law.step * recipe.batch / batch  # as many examples as the run
        print(
            f"| {batch} | {said.steps} ({said.low} to {said.high}) | {shown} | {ratio} | {inside} "
            f"| {naive / median if median else 0:.2f} |", flush=True
        )  # fmt: skip
    print(f"\nBeyond {REACH} times the batch it is refused.", file=sys.stderr)


if __name__ == "__main__":
    main()
