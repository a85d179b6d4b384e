"""Reinforcement learning as a recipe: an actor and a critic that balance a pole on a cart.

    python examples/actor_critic.py
    chipwise train examples/actor_critic.py:recipe --simulate 8

The environment is a function of JAX, so an episode is a part of the loss: an example is the start of one, and
the step's key decides what the actor tries. Replicas play their episodes on any devices, with the same bits;
a run goes on after a stop. An environment outside of JAX cannot be a part of a compiled step: collect its
episodes into `cw.Arrays`, train on these for some steps, go on with `cw.pretrained(run, optimizer=True)`.

Cart and pole: Barto, Sutton and Anderson 1983, "Neuronlike adaptive elements", with the constants of OpenAI
Gym's CartPole-v1. An episode ends after 200 steps, or when the pole or the cart leaves its range. Measured on
2 CPU cores: balanced for all 200 steps after 50 steps of training, 9 s of processor time.
"""

import jax
import jax.numpy as jnp
import numpy as np

import chipwise as cw

HORIZON, HIDDEN, DISCOUNT = 200, 64, 0.98


def moved(at, push):
    """The state after 0.02 s, `(4,)`: place, speed, angle and its speed. `push`: True for to the right."""
    _, speed, angle, turning = at
    force = jnp.where(push, 10.0, -10.0)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    pushed = (force + 0.05 * turning**2 * sine) / 1.1
    bent = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    return at + 0.02 * jnp.stack([speed, pushed - 0.05 * bent * cosine / 1.1, turning, bent])


def init(key):
    keys = jax.random.split(key, 4)

    def layer(key, inputs, outputs, size=1.0):
        w = size * jax.random.normal(key, (inputs, outputs), jnp.float32) / inputs**0.5
        return {"w": w, "b": jnp.zeros(outputs, jnp.float32)}

    return {
        "actor": [layer(keys[0], 4, HIDDEN), layer(keys[1], HIDDEN, 1, 0.01)],
        "critic": [layer(keys[2], 4, HIDDEN), layer(keys[3], HIDDEN, 1, 0.01)],
    }, {}


def through(net, at):
    hidden = jnp.tanh(at @ net[0]["w"] + net[0]["b"])
    return (hidden @ net[1]["w"] + net[1]["b"])[0]


def episode(params, start, key, train):
    """The two losses of one episode from `start` `(4,)`, and its length."""

    def step(carry, key):
        at, alive = carry
        logit, value = through(params["actor"], at), through(params["critic"], at)
        push = jax.random.bernoulli(key, jax.nn.sigmoid(logit)) if train else logit > 0
        chosen = -jax.nn.softplus(jnp.where(push, -logit, logit))  # the logarithm of its probability
        after = jax.lax.stop_gradient(moved(at, push))
        up = alive & (jnp.abs(after[0]) < 2.4) & (jnp.abs(after[2]) < 0.2095)
        return (after, up), (chosen, value, alive.astype(jnp.float32), through(params["critic"], after), up)

    (_, _), (chosen, value, alive, following, up) = jax.lax.scan(
        step, (start, jnp.bool_(True)), jax.random.split(key, HORIZON)
    )
    ahead = jnp.where(up, jax.lax.stop_gradient(following), 0.0)[-1]  # the horizon is no end

    def back(total, now):
        reward, goes_on = now
        total = reward + DISCOUNT * jnp.where(goes_on, total, 0.0)
        return total, total

    _, returns = jax.lax.scan(back, ahead, (alive, up), reverse=True)
    advantage = jax.lax.stop_gradient(returns - value)
    return -jnp.sum(alive * advantage * chosen), jnp.sum(alive * (returns - value) ** 2), jnp.sum(alive)


def loss(params, state, batch, key, train):
    keys = jax.random.split(jax.random.key(0) if key is None else key, len(batch["start"]))
    play = jax.vmap(lambda start, key: episode(params, start, key, train))
    actor, critic, length = play(batch["start"], keys)
    return {"loss": cw.Sum.of((actor + 0.05 * critic) / HORIZON), "length": cw.Sum.of(length)}, state


def recipe(duration="200st"):
    rng = np.random.default_rng(0)
    starts = [cw.Arrays(start=rng.uniform(-0.05, 0.05, (n, 4)).astype(np.float32)) for n in (4096, 64)]
    task = cw.Task(init=init, loss=loss, train=starts[0], eval=starts[1])
    optimizer = cw.adam(lr=cw.one_cycle(0.01, warmup="10%"), clip=1.0)
    return cw.Recipe(
        name="cart-pole", task=task, batch=64, replicas=4, duration=duration, optimizer=optimizer
    )


if __name__ == "__main__":
    result = cw.fit(recipe(), eval_every="50st", log_every="50st", progress="lines")
    print(f"steps balanced, of {HORIZON}: {result.metrics['eval/length']:.0f}")
