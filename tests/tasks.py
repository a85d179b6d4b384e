"""Small tasks with everything that could tell devices apart: batch norm, dropout, random augmentation,
constants that invite fused multiply-adds, an integer in the state, and sizes that divide nothing.

`quick` is for tests of something else: it has none of the first four, and takes half as long to trace and
compile.
"""

import jax
import jax.numpy as jnp
import numpy as np

import chipwise as cw
from chipwise.data import PackedFolder

FEATURES, CLASSES = 12, 5


def data(n=101, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (n, FEATURES)).astype(np.uint8)
    y = (x.astype(np.int64) @ rng.integers(0, 7, FEATURES) % CLASSES).astype(np.int32)
    return cw.Arrays(x=x, label=y)


def init(key):
    a, b = jax.random.split(key)
    params = {
        "w": 0.3 * jax.random.normal(a, (FEATURES, 16), jnp.float32),
        "scale": jnp.ones(16),
        "shift": jnp.zeros(16),
        "v": 0.3 * jax.random.normal(b, (16, CLASSES), jnp.float32),
    }
    return params, {"mean": jnp.zeros(16), "var": jnp.ones(16), "calls": jnp.int32(0)}


def loss(params, state, batch, key, train):
    x = batch["x"].astype(jnp.float32) / jnp.float32(255)
    h = x @ params["w"]
    if train:
        mean, var = jnp.mean(h, axis=0), jnp.var(h, axis=0)
        state = {
            "mean": 0.9 * state["mean"] + 0.1 * mean,
            "var": 0.9 * state["var"] + 0.1 * var,
            "calls": state["calls"] + jnp.int32(1),
        }
    else:
        mean, var = state["mean"], state["var"]
    h = (h - mean[None]) / jnp.sqrt(var[None] + 1e-5) * params["scale"][None] + params["shift"][None]
    h = jax.nn.relu(h)
    if train:
        h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0.0)
    logits = 0.37 * (h @ params["v"])
    values = cw.losses.softmax_cross_entropy(logits, batch["label"])
    return {
        "loss": cw.Sum.of(values),
        "accuracy": cw.Sum.of(cw.losses.correct(logits, batch["label"])),
    }, state


def augment(example, key):
    shift = jax.random.randint(key, (), 0, FEATURES)
    return {**example, "x": jnp.roll(example["x"], shift)}


def plain_loss(params, state, batch, key, train):
    """No batch norm, no randomness: what replicas must not change."""
    values = cw.losses.softmax_cross_entropy(plain_logits(params, batch), batch["label"])
    return {"loss": cw.Sum.of(values)}, state


def quick_loss(params, state, batch, key, train):
    """The plain loss, with the metrics of `loss` and a count in the state."""
    logits = plain_logits(params, batch)
    if train:
        state = {**state, "calls": state["calls"] + jnp.int32(1)}
    return {
        "loss": cw.Sum.of(cw.losses.softmax_cross_entropy(logits, batch["label"])),
        "accuracy": cw.Sum.of(cw.losses.correct(logits, batch["label"])),
    }, state


def edited_loss(params, state, batch, key, train):
    """Half of `quick_loss` by its name, as in an edited file."""
    sums, state = quick_loss(params, state, batch, key, train)
    return sums | {"loss": cw.Sum(sums["loss"].total / 2, sums["loss"].count)}, state


edited_loss.__qualname__ = quick_loss.__qualname__


def plain_logits(params, batch):
    h = jnp.tanh((batch["x"].astype(jnp.float32) / jnp.float32(255)).astype(params["w"].dtype) @ params["w"])
    return h @ params["v"]


def task(**changes):
    return cw.Task(
        **{"init": init, "loss": loss, "train": data(), "eval": data(53, 1), "augment": augment, **changes}
    )


def quick_task(**changes):
    return task(**{"loss": quick_loss, "augment": None, **changes})


def quick(**changes):
    """The recipe where what it computes does not matter."""
    return recipe(**{"task": quick_task(), **changes})


def recipe(**changes):
    settings = {
        "task": task(),
        "batch": 24,
        "replicas": 8,
        "duration": "30st",
        "optimizer": cw.adamw(lr=cw.one_cycle(0.02, warmup="20%"), weight_decay=0.01),
        "seed": 3,
        **changes,
    }
    return cw.Recipe(**settings)


def long(**changes):
    """A recipe of some hundred steps, for the command line: `tasks.py:long`."""
    return recipe(**{"duration": "600st", **changes})


def packed(data, **changes):
    """The same net over a pack of 2 by 2 pixels, for the command line: `tasks.py:packed`."""

    def flat(batch):
        return {**batch, "x": batch["image"].reshape(*batch["image"].shape[:-3], FEATURES)}

    def of_images(params, state, batch, key, train):
        return loss(params, state, flat(batch), key, train)

    def rolled(example, key):
        return {**example, "image": jnp.roll(example["image"], jax.random.randint(key, (), 0, 3), axis=-1)}

    source = PackedFolder(data)
    return recipe(
        task=cw.Task(init=init, loss=of_images, train=source, eval=source, augment=rolled), **changes
    )
