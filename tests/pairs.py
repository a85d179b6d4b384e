"""Pairs of recipes that differ in one thing each, for `diff` and `audit`: `tests/tasks.py` and its
variants."""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import chipwise as cw
import tasks


def loss(
    params, state, batch, key, train, *, fold=False, half=False, epsilon=1e-5, turned=False, momentum=0.9,
    more=False,
):  # fmt: skip
    x = batch["x"].astype(jnp.float32) / jnp.float32(255)
    h = x @ params["w"]
    if train:
        mean, var = jnp.mean(h, axis=0), jnp.var(h, axis=0)
        state = {
            "mean": momentum * state["mean"] + (1 - momentum) * mean,  # the line of another momentum
            "var": momentum * state["var"] + (1 - momentum) * var,
            "calls": state["calls"] + jnp.int32(1),
        }
    else:
        mean, var = state["mean"], state["var"]
    h = (h - mean[None]) / jnp.sqrt(var[None] + epsilon)  # the line of another epsilon
    h = jax.nn.relu(h * params["scale"][None] + params["shift"][None])
    if fold:
        key = jax.random.fold_in(key, 1)  # the line of another key
    if train:
        h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0.0)
    if turned:
        h = h[:, ::-1]  # the line of a turned kernel
    if half:
        logits = (h.astype(jnp.bfloat16) @ params["v"].astype(jnp.bfloat16)).astype(jnp.float32)  # of half
    else:
        logits = h @ params["v"]
    values = cw.losses.softmax_cross_entropy(logits, batch["label"])
    if more:
        values = values + 0.01 * jnp.mean(jnp.square(logits), axis=-1)  # an added line
    return {"loss": cw.Sum.of(values)}, state


def changed(**changes):
    """The loss with one line changed."""

    def with_changes(params, state, batch, key, train):
        return loss(params, state, batch, key, train, **changes)

    return with_changes


def refactored(params, state, batch, key, train):
    """The same loss, called from somewhere else, with a value that nobody uses."""
    unused = jnp.sum(params["v"]) * 2
    del unused
    return loss(params, state, batch, key, train)


def augment(example, key):
    """Another augmentation than that of `tasks`."""
    shift = jax.random.randint(key, (), 0, tasks.FEATURES - 1)  # the line of another augmentation
    return {**example, "x": jnp.roll(example["x"], shift)}


def relabelled(example=40):
    data = tasks.data()
    data.columns["label"][example] = (data.columns["label"][example] + 1) % tasks.CLASSES
    return data


def late(progress=0):
    """A schedule whose warm-up is a step longer."""
    return cw.one_cycle(0.02, warmup=f"{6 + progress}st")


def chained(after):
    decay, clip = optax.add_decayed_weights(0.01), optax.clip_by_global_norm(0.3)

    def made(lr):
        return optax.chain(*((clip, decay) if after else (decay, clip)), optax.sgd(lr))

    return cw.from_optax(made, lr=0.05)


def recipe(lossy=None, train=None, **changes):
    task = {"loss": lossy or changed()} | ({} if train is None else {"train": train})
    given = {"augment": changes.pop("augment")} if "augment" in changes else {}
    settings = {"task": tasks.task(**task, **given), "optimizer": cw.adamw(lr=late(), weight_decay=0.01)}
    return tasks.recipe(**{**settings, "duration": "20st", **changes})


def line(text, name="loss"):
    """Where the line with the comment `text` is, as `diff` shows it."""
    source = Path(__file__).read_text().splitlines()
    return f"pairs.py:{1 + next(i for i, one in enumerate(source) if text in one and '# ' in one)} ({name})"


PAIRS = {
    "seed": (recipe(), recipe(seed=4), "diff-seed", None),
    "label": (recipe(), recipe(train=relabelled()), "diff-example", None),
    "key": (recipe(), recipe(changed(fold=True)), "diff-operation", line("another key")),
    "decay": (recipe(optimizer=chained(False)), recipe(optimizer=chained(True)), "diff-operation", "_"),
    "half": (recipe(), recipe(changed(half=True)), "diff-operation", line("of half")),
    "epsilon": (recipe(), recipe(changed(epsilon=1e-4)), "diff-operation", line("another epsilon")),
    "turned": (recipe(), recipe(changed(turned=True)), "diff-operation", line("turned kernel")),
    "momentum": (recipe(), recipe(changed(momentum=0.99)), "diff-operation", line("another momentum")),
    "schedule": (recipe(), recipe(optimizer=cw.adamw(lr=late(1), weight_decay=0.01)), "diff-rate", None),
    "augment": (recipe(), recipe(augment=augment), "diff-operation", line("another augmentation", "augment")),
    "refactored": (recipe(), recipe(refactored), None, None),
    "clip": (
        recipe(),
        recipe(optimizer=cw.adamw(lr=late(), weight_decay=0.01, clip=0.1)),
        "diff-operation",
        "_",
    ),
}
"""Name to two recipes, the cause that `diff` names, and the place of its operation."""
