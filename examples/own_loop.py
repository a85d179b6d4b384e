"""Your own loop over the step of `cw.fit`: the same bits, and anything you want between steps.

python examples/own_loop.py

It stops early when the evaluation loss has not improved for `patience` epochs, and keeps the best parameters
in memory. (`fit` can do this too: `keep_best=`, `patience=`.) It has no checkpoints, no run folder, and does
not save on Ctrl-C. With `patience=None` it runs to the end, and its fingerprint is that of `cw.fit(recipe)`.

Measured on 2 CPU cores: 12 s of processor time, stops after 529 of 674 steps, accuracy 0.969.
"""

import math

import chipwise as cw


def train(recipe, patience=3, on=None):
    """`(metrics, params, fingerprint)` of the best evaluation, or of the last if `patience` is `None`."""
    every = math.ceil(len(recipe.task.train) / recipe.batch)  # steps, about an epoch
    best = (math.inf, {}, None, "")
    waited = 0
    with cw.Stepper(recipe, on or cw.On()) as stepper:  # reads the data, compiles
        while stepper.done < stepper.total:
            stepper.step()  # starts the step on every device and returns
            if stepper.done % every and stepper.done < stepper.total:
                continue

            trained = stepper.metrics()  # of the steps since the last call; waits for the device
            evaluated = stepper.evaluate()  # every example once
            print(f"step {stepper.done}: train {trained['loss']:.4f}, eval {evaluated['loss']:.4f}")
            if not math.isfinite(trained["loss"]):
                raise FloatingPointError(f"step {stepper.done}: the loss is {trained['loss']}")

            waited += 1
            if patience is None or evaluated["loss"] < best[0]:
                best = evaluated["loss"], evaluated, stepper.state()[0], stepper.fingerprint()
                waited = 0
            elif waited == patience:
                break
    return best[1:]


if __name__ == "__main__":
    metrics, params, fingerprint = train(cw.load("digits"))
    print(f"accuracy {metrics['accuracy']:.3f}  fingerprint {fingerprint[:16]}")
