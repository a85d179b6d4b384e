"""Six techniques of one recipe, a switch each: four help, and two do nothing.

chipwise referee examples/techniques.py:recipe --drop --metric eval/loss --margin 20%
"""

import jax
import jax.numpy as jnp

import chipwise as cw


def recipe(
    scaled: bool = True,
    hidden: bool = True,
    momentum: bool = True,
    schedule: bool = True,
    redrawn: bool = True,
    stabilised: bool = True,
):
    """*Arguments:* `redrawn` takes the first weights from another key, and so is no better or worse.
    `stabilised` has a name that promises much, and reaches nothing."""

    def init(key):
        first, second = jax.random.split(jax.random.fold_in(key, 1) if redrawn else key)
        draw, width = jax.nn.initializers.lecun_normal(), 32
        if not hidden:
            return {"head": draw(second, (64, 10))}, {}
        return {"hidden": draw(first, (64, width)), "head": draw(second, (width, 10))}, {}

    def loss(params, state, batch, key, train):
        x = batch["image"].reshape(-1, 64).astype(jnp.float32) / (16 if scaled else 64)
        if hidden:
            x = jax.nn.relu(x @ params["hidden"])
        logits = x @ params["head"]
        values = cw.losses.softmax_cross_entropy(logits, batch["label"])
        return {"loss": cw.Sum.of(values)}, state

    assert stabilised in (True, False)
    data = cw.datasets.digits()
    task = cw.Task(init=init, loss=loss, train=data.train, eval=data.eval)
    lr = cw.one_cycle(0.1, warmup="20%") if schedule else 0.02
    optimizer = cw.sgd(lr=lr, momentum=0.9 if momentum else 0)
    return cw.Recipe(name="techniques", task=task, batch=64, duration="4ep", optimizer=optimizer)
