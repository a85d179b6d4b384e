"""A lower rate whenever the evaluation stops improving, as PyTorch's `ReduceLROnPlateau`.

    python examples/reduce_on_plateau.py

Rates of a run are known before it begins. So each rate is a run of its own, `runs/plateau/0`, `1`, ...: it
ends by `patience`, and the next goes on with its weights and its optimizer's state. Evaluations are exact, so
the rates fall at the same steps on any number of devices, and a killed program goes on where it was.

Measured on 2 CPU cores: 25 s of processor time; five rates, the test loss from 0.110 to 0.074.
"""

import dataclasses
import itertools

import chipwise as cw


def train(recipe, folder, metric="eval/loss", patience="2ep", factor=0.1, least=1e-6, **how):
    """The results of all rates. `recipe` has a number for its rate; `how`: more arguments of `cw.fit`."""
    task, left, results = recipe.task, recipe.clock.total, []
    for number in itertools.count():
        run = f"{folder}/{number}"
        results.append(cw.fit(recipe, run, keep_best=metric, patience=patience, **how))
        left -= results[-1].steps
        rate = recipe.optimizer.settings["lr"] * factor
        if left <= 0 or rate < least or not results[-1].kept.ended_early:
            return results
        recipe = dataclasses.replace(
            recipe,
            task=cw.pretrained(run, optimizer=True).start(task),
            optimizer=recipe.optimizer.replace(lr=rate),
            duration=f"{left}st",
            seed=recipe.seed + 1,  # another order of the examples than before
        )


if __name__ == "__main__":
    constant = dataclasses.replace(cw.load("digits"), optimizer=cw.adam(lr=0.01), duration="60ep")
    for result in train(constant, "runs/plateau", progress="none"):
        told = result.metrics
        print(f"{result.steps} steps  loss {told['eval/loss']:.4f}  accuracy {told['eval/accuracy']:.3f}")
