"""A complete task of your own: noisy spirals, two plain functions, no framework.

    chipwise train examples/own_task.py:recipe
    chipwise train examples/own_task.py:recipe --simulate 8 --set lr=0.02
    python examples/own_task.py

About 5 seconds on a laptop, evaluation accuracy 1.000 (measured: 2 CPU cores).
"""

import jax
import jax.numpy as jnp
import numpy as np

import chipwise as cw


def spirals(n, seed):
    """Points on three spiral arms: `x` (n, 2) float32, and the arm, `label` (n,) int32."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, n).astype(np.int32)
    radius = rng.uniform(0.1, 1, n)
    angle = 4 * radius + label * 2 * np.pi / 3 + rng.normal(0, 0.08, n)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32)
    return cw.Arrays(x=x, label=label)


def init(key):
    keys = jax.random.split(key, 3)
    sizes = [(2, 64), (64, 64), (64, 3)]
    layers = [
        {"w": jax.random.normal(k, s, jnp.float32) * (2 / s[0]) ** 0.5, "b": jnp.zeros(s[1], jnp.float32)}
        for k, s in zip(keys, sizes, strict=True)
    ]
    return {"layers": layers}, {}


def loss(params, state, batch, key, train):
    x = batch["x"]
    *hidden, last = params["layers"]
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
    logits = x @ last["w"] + last["b"][None]
    values = cw.losses.softmax_cross_entropy(logits, batch["label"])
    return {
        "loss": cw.Sum.of(values),
        "accuracy": cw.Sum.of(cw.losses.correct(logits, batch["label"])),
    }, state


def recipe():
    task = cw.Task(init=init, loss=loss, train=spirals(6000, seed=0), eval=spirals(1000, seed=1), classes=3)
    optimizer = cw.adamw(lr=cw.one_cycle(0.01, warmup="20%"), weight_decay=1e-4)
    return cw.Recipe(name="spirals", task=task, batch=128, replicas=8, duration="20ep", optimizer=optimizer)


if __name__ == "__main__":
    result = cw.fit(recipe(), run=None)
    print(f"accuracy {result.metrics['eval/accuracy']:.3f}  fingerprint {result.fingerprint[:16]}")
