"""Two networks that train each other: a GAN on the 8x8 digits, as one recipe.

    python examples/gan.py
    chipwise train examples/gan.py:recipe --simulate 8

Both losses are summed, and `stop_gradient` gives each network the gradient of its own loss alone, so a step
moves both at once. `cw.recipe.grouped` gives each network a rate of its own. The run has the same bits on any
number of devices, and goes on after a stop. 10 s of processor time, and eight digits as text.

Loss of the generator: Goodfellow et al. 2014, arXiv:1406.2661, section 3, the one that does not saturate.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

import chipwise as cw

NOISE, HIDDEN, PIXELS = 16, 128, 64


def layers(key, *sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = list(itertools.pairwise(sizes))
    return [
        {"w": jax.random.normal(k, s, jnp.float32) * (2 / s[0]) ** 0.5, "b": jnp.zeros(s[1], jnp.float32)}
        for k, s in zip(keys, shapes, strict=True)
    ]


def through(net, x):
    *hidden, last = net
    for layer in hidden:
        x = jax.nn.leaky_relu(x @ layer["w"] + layer["b"][None], 0.2)
    return x @ last["w"] + last["b"][None]


def init(key):
    a, b = jax.random.split(key)
    generator = layers(a, NOISE, HIDDEN, HIDDEN, PIXELS)
    return {"generator": generator, "discriminator": layers(b, PIXELS, HIDDEN, 1)}, {}


def loss(params, state, batch, key, train):
    real = batch["image"].reshape(-1, PIXELS).astype(jnp.float32) / 8 - 1
    if train:
        noise = jax.random.normal(key, (len(real), NOISE), jnp.float32)
    else:  # an example's own, so that evaluation does not depend on the batch
        noise = jax.vmap(lambda i: jax.random.normal(jax.random.key(i), (NOISE,), jnp.float32))(
            batch["noise"]
        )
    fake = jnp.tanh(through(params["generator"], noise))
    judge, fixed = params["discriminator"], jax.lax.stop_gradient(params["discriminator"])
    on_real = through(judge, real)[:, 0]
    on_fake = through(judge, jax.lax.stop_gradient(fake))[:, 0]
    discriminator = jax.nn.softplus(-on_real) + jax.nn.softplus(on_fake)
    generator = jax.nn.softplus(-through(fixed, fake)[:, 0])
    return {
        "loss": cw.Sum.of(discriminator + generator),
        "discriminator": cw.Sum.of(discriminator),
        "generator": cw.Sum.of(generator),
        "real called real": cw.Sum.of((on_real > 0).astype(jnp.float32)),
        "fake called real": cw.Sum.of((on_fake > 0).astype(jnp.float32)),
    }, state


def predict(params, state, inputs):
    """Images `(batch, 8, 8)` from 0 to 16, one of each number in the column `noise` `(batch,)`."""
    noise = jax.vmap(lambda i: jax.random.normal(jax.random.key(i), (NOISE,), jnp.float32))(inputs["noise"])
    return 8 * (1 + jnp.tanh(through(params["generator"], noise))).reshape(-1, 8, 8)


def recipe(duration="150ep"):
    digits = cw.datasets.digits()
    train, held_out = (
        cw.Arrays(
            image=(x := cw.data.take(s, range(len(s))))["image"],
            noise=np.arange(len(x["image"]), dtype=np.int32),
        )
        for s in (digits.train, digits.eval)
    )
    task = cw.Task(init=init, loss=loss, predict=predict, returns="values", train=train, eval=held_out)
    adam = cw.adam(lr=1e-3, b1=0.5)
    optimizer = cw.recipe.grouped(adam, {"discriminator/*": {"lr": 0.5}})
    return cw.Recipe(
        name="gan", task=task, batch=64, replicas=4, duration=duration, optimizer=optimizer, ema=0.99
    )


if __name__ == "__main__":
    result = cw.fit(recipe(), progress="none")
    print({name: round(float(value), 3) for name, value in result.metrics.items()})
    given = cw.Arrays(image=np.zeros((8, 8, 8), np.uint8), noise=np.arange(8, dtype=np.int32))
    images = cw.predict(result, given).outputs
    for rows in np.swapaxes(images, 0, 1):  # eight digits, side by side
        print("  ".join("".join(" .:-=+*#%@"[int(9 * v / 16.01)] * 2 for v in row) for row in rows))
