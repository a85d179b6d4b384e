"""The same network as two plain JAX functions, with its own convolutions, batch norm and dropout.

chipwise train examples/my_functions.py:recipe --simulate 8
chipwise plan examples/my_functions.py:recipe --on v5e-8,t4
"""

import jax
import jax.numpy as jnp
from jax import lax

import chipwise as cw


def init(key):
    keys = jax.random.split(key, 3)
    draw = jax.nn.initializers.lecun_normal()
    params, state = {}, {}
    for i, (inputs, outputs) in enumerate(((1, 16), (16, 32)), 1):
        params[f"conv{i}"] = {"kernel": draw(keys[i], (3, 3, inputs, outputs)), "bias": flat(0.0, outputs)}
        params[f"norm{i}"] = {"scale": flat(1.0, outputs), "bias": flat(0.0, outputs)}
        state[f"norm{i}"] = {"mean": flat(0.0, outputs), "var": flat(1.0, outputs)}
    params["head"] = {"kernel": draw(keys[0], (512, 10)), "bias": jnp.zeros((1, 10), jnp.float32)}
    return params, state


def flat(value, channels):
    return jnp.full((1, 1, 1, channels), value, jnp.float32)


def conv(params, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    return (
        lax.conv_general_dilated(x, params["kernel"], (1, 1), "SAME", dimension_numbers=numbers)
        + params["bias"]
    )


def norm(params, state, x, train, momentum=0.9):
    """Batch norm: in training with the batch's statistics, in evaluation with their running averages."""
    mean, var = state["mean"], state["var"]
    if train:
        mean, var = x.mean((0, 1, 2), keepdims=True), x.var((0, 1, 2), keepdims=True)
        new = {"mean": mean, "var": var}
        state = {name: momentum * state[name] + (1 - momentum) * new[name] for name in state}
    return (x - mean) * lax.rsqrt(var + 1e-5) * params["scale"] + params["bias"], state


def logits(params, state, images, key=None, train=False, dropout=0.2):
    x = images.reshape(-1, 8, 8, 1).astype(params["head"]["bias"].dtype) / 16
    moved = {}
    for i in (1, 2):
        x, moved[f"norm{i}"] = norm(params[f"norm{i}"], state[f"norm{i}"], conv(params[f"conv{i}"], x), train)
        x = jax.nn.relu(x)
        if i == 1:
            x = x.reshape(-1, 4, 2, 4, 2, 16).max((2, 4))
    x = x.reshape(-1, 512)
    if train and dropout:
        x = jnp.where(jax.random.bernoulli(key, 1 - dropout, x.shape), x / (1 - dropout), 0)
    return x @ params["head"]["kernel"] + params["head"]["bias"], moved


def predict(params, state, inputs):
    return logits(params, state, inputs["image"])[0]


def recipe(dropout: float = 0.2):
    def loss(params, state, batch, key, train):
        outputs, state = logits(params, state, batch["image"], key, train, dropout)
        values = cw.losses.softmax_cross_entropy(outputs, batch["label"])
        right = cw.losses.correct(outputs, batch["label"])
        return {"loss": cw.Sum.of(values), "accuracy": cw.Sum.of(right)}, state

    data = cw.datasets.digits()
    task = cw.Task(init=init, loss=loss, predict=predict, train=data.train, eval=data.eval)
    optimizer = cw.sgd(lr=cw.one_cycle(0.1), momentum=0.9, weight_decay=5e-4)
    return cw.Recipe(
        name="my-functions", task=task, batch=64, replicas=8, duration="10ep", optimizer=optimizer
    )


if __name__ == "__main__":
    result = cw.fit(recipe())
    print(f"accuracy {result.metrics['eval/accuracy']:.3f}  fingerprint {result.fingerprint[:16]}")
