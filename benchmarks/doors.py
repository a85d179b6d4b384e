"""Steps a second through each door, beside the framework's own training loop, on this machine's CPU.

    python benchmarks/doors.py [--doors torch keras] [--runs 5] [--steps 200]

The networks are those of `examples/my_*.py`: batch 64 of 8 x 8 digits, SGD with momentum, float32. chipwise
runs 1 replica, so that both sides compute one batch at once. A step is forward, loss, backward and update;
compiling and 20 warm-up steps come before the clock. Every measurement is a process of its own, and the
contenders alternate, so that a busy minute meets both. Writes its table to `benchmarks/doors.md`. Run it on
a quiet machine.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOORS = ("torch", "keras", "nnx", "linen", "equinox")
BATCH, WARM = 64, 20


def ours(door, steps):
    """Steps a second of chipwise's own loop, its median."""
    import chipwise as cw

    settings = [f"duration={WARM + steps}st", "replicas=1"]
    recipe = cw.load(str(ROOT / f"examples/my_{door}.py:recipe"), settings)
    with cw.Stepper(recipe, on=cw.On(devices=1)) as stepper:

        def run(n):
            for _ in range(n):
                stepper.step()
            stepper.metrics()  # waits for the last

        return rate(run, steps)


def theirs(door, steps):
    """Steps a second of the loop that the framework's own documentation shows."""
    sys.path.insert(0, str(ROOT / "examples"))
    import numpy as np

    rng = np.random.default_rng(0)
    images = rng.normal(size=(BATCH, 8, 8, 1)).astype(np.float32)
    labels = rng.integers(0, 10, BATCH)
    return rate({"torch": torch_loop, "keras": keras_loop}.get(door, jax_loop)(door, images, labels), steps)


def rate(run, steps):
    run(WARM)
    begin = time.perf_counter()
    run(steps)
    return steps / (time.perf_counter() - begin)


def torch_loop(door, images, labels):
    import my_torch
    import torch

    module = my_torch.net().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    x, y = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)

    def run(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()

    return run


def keras_loop(door, images, labels):
    import keras
    import my_keras

    model = my_keras.net()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=5e-4), loss=loss)

    def run(steps):
        for _ in range(steps):
            model.train_on_batch(images, labels)

    return run


def jax_loop(door, images, labels):
    """Flax and Equinox leave the loop to their users: jit, grad and optax, as in their examples."""
    import importlib

    import jax
    import jax.numpy as jnp
    import optax

    task = importlib.import_module(f"my_{door}").recipe().task
    optimizer = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(0.1, momentum=0.9))
    batch = {"image": jnp.asarray(images.reshape(BATCH, 8, 8)), "label": jnp.asarray(labels, jnp.int32)}
    params, state = task.init(jax.random.key(0))
    held = [params, state, optimizer.init(params), jax.random.key(1)]

    @jax.jit
    def step(params, state, moments, key):
        key, own = jax.random.split(key)

        def mean(params):
            sums, new = task.loss(params, state, batch, own, True)
            return sums["loss"].total / sums["loss"].count, new

        grads, state_after = jax.grad(mean, has_aux=True)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), state_after, moments, key

    def run(steps):
        for _ in range(steps):
            held[:] = step(*held)
        jax.block_until_ready(held[0])

    return run


def measured(kind, door, steps):
    command = [sys.executable, __file__, "--one", kind, door, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--doors", nargs="+", default=list(DOORS), choices=DOORS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--one", nargs=2)
    given = parser.parse_args()
    if given.one:
        kind, door = given.one
        print(json.dumps({"ours": ours, "theirs": theirs}[kind](door, given.steps)))
        return
    lines = ["| door | chipwise, steps/s | the framework's own loop | ratio |", "|---|---|---|---|"]
    for door in given.doors:
        runs = {"ours": [], "theirs": []}
        for _ in range(given.runs):
            for kind, values in runs.items():
                values.append(measured(kind, door, given.steps))
        a, b = (statistics.median(values) for values in runs.values())
        spread = {k: f"{min(v):.0f} to {max(v):.0f}" for k, v in runs.items()}
        lines.append(f"| {door} | {a:.0f} ({spread['ours']}) | {b:.0f} ({spread['theirs']}) | {a / b:.2f} |")
        print(lines[-1], flush=True)
    chip = platform.processor() or platform.machine()
    about = f"{chip}, {given.runs} runs of {given.steps} steps, {date.today()}; median (range)."
    page = [f"# Steps a second through each door\n\n`python benchmarks/doors.py`: {about}\n", *lines]
    (ROOT / "benchmarks" / "doors.md").write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
