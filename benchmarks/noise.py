"""The law of the critical batch against measurement: steps and seconds to a loss at six batches, predicted
from one run and, of each batch, from the time of a step by `chipwise bench`.

    python benchmarks/noise.py digits 16,32,128,256,512,1024 >> benchmarks/noise.md
    python benchmarks/noise.py mnist 32,64,128,512,1024,2048 --data DIR --set duration=2ep \\
        --set bn_momentum=0.9

Each batch has the settings that `chipwise transfer` gives it, and a run whose length follows from the law, so
that schedules keep their form. The goal is the loss that the recipe's own batch has after two thirds of its
steps, in the mean of the seeds. Seconds are those of training alone, without the evaluations, which are more
here than a user would ask for. Steps do not depend on the machine's speed; seconds need it for themselves.
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
from chipwise.recipes.load import load
from chipwise.run.folder.run_reader import read_run
from chipwise.study.bench import measure_train
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


def reached(made: list[dict], goal: Goal) -> tuple[int, float] | None:
    """The first step whose evaluation reached the goal, and the seconds of training until then."""
    step = next((row["step"] for row in made if goal.reached(row.get(METRIC))), None)
    if step is None:
        return None
    speeds = [(row["step"], row["steps_per_second"]) for row in made if row.get("steps_per_second")]
    befores = [0, *(at for at, _ in speeds)]
    own = [(at - before, speed) for before, (at, speed) in zip(befores, speeds, strict=False) if at <= step]
    return step, sum(steps / speed for steps, speed in own)


def seconds_a_step(recipe: cw.Recipe) -> float:
    """By the benchmark of a user's command, three seconds long."""
    record = measure_train(recipe, seconds=3, on=cw.On(devices=1), progress="none")
    return 1 / record.figures["steps_per_second"].median


def moved(recipe: cw.Recipe, law: CriticalBatch, batch: int) -> cw.Recipe:
    """The recipe at another batch, as long in proportion as the law says."""
    length = round(recipe.clock.total * law.steps(batch).steps / law.step)
    replicas = max(recipe.replicas * batch // recipe.batch, 1)  # batch norm over as many examples as before
    return cw.transfer(recipe, batch=batch, replicas=replicas, duration=f"{length}st").recipe


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
    print(f"| batch | {columns} | seconds, predicted | measured, median | predicted / measured |")
    print("|---|---|---|---|---|---|---|---|---|")
    for batch in given.batches:
        said, other = law.steps(batch), moved(recipe, law, batch)
        each = seconds_a_step(other)
        both = [reached(rows(other, seed), goal) for seed in range(given.seeds)]
        made = [one and one[0] for one in both]
        found = [step for step in made if step is not None]
        median = statistics.median(found) if found else None
        took = statistics.median(one[1] for one in both if one) if found else 0
        ratio = f"{said.steps / median:.2f}" if median else "-"
        inside = f"{sum(said.low <= step <= said.high for step in found)} of {given.seeds}"
        shown = ", ".join("not" if step is None else str(step) for step in made)
        naive = law.step * recipe.batch / batch  # as many examples as the run
        print(
            f"| {batch} | {said.steps} ({said.low} to {said.high}) | {shown} | {ratio} | {inside} "
            f"| {naive / median if median else 0:.2f} | {each * said.steps:.1f} "
            f"({each * said.low:.1f} to {each * said.high:.1f}) | {took:.1f} "
            f"| {each * said.steps / took if took else 0:.2f} |", flush=True
        )  # fmt: skip
    print(f"\nBeyond {REACH} times the batch it is refused.", file=sys.stderr)


if __name__ == "__main__":
    main()
