"""Small nets that nobody chose: each seed draws a loss, its data, its recipe, and ways to run it.

Compilers contract and order operations as the code around them suggests. That shows in nets of few
operations: elementwise ones first, slices, reductions, gathers, few parameters, odd shapes. Large nets hide
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import chipwise as cw

Operation = Callable[[dict, dict, jax.Array], jax.Array]


class Net:
    """A loss drawn from `rng`, of examples that it draws too.

    *Fields:* `columns` of `examples`, column to array; `params`, the first parameters; `operations`, from the
    values of an example to others.
    """

    def __init__(self, rng: np.random.Generator, examples: int):
        self.rng, self.examples = rng, examples
        self.params: dict[str, np.ndarray] = {}
        self.shape = tuple(int(n) for n in rng.integers(2, 7, rng.integers(1, 4)))
        self.columns = {"x": self._values()}
        self.target = bool(rng.integers(2))
        self.weighted = rng.random() < 0.3
        if self.weighted:
            self.columns["weight"] = rng.integers(1, 4, examples).astype(np.float32)
        self.noisy = rng.random() < 0.2
        self.counts = rng.random() < 0.3
        self.measures = rng.random() < 0.3
        chosen = rng.choice(FIRST, 1).tolist() + rng.choice(KINDS, rng.integers(0, 4)).tolist()
        self.operations = [made for kind in chosen if (made := getattr(self, f"_{kind}")()) is not None]
        if not self.params:
            self.operations.insert(0, self._scale())
        if self.target:
            self.columns["y"] = rng.normal(size=(examples, *self.shape)).astype(np.float32)

    def _values(self) -> np.ndarray:
        shape = (self.examples, *self.shape)
        if self.rng.random() < 0.3:
            return self.rng.integers(0, 256, shape).astype(np.uint8)
        return self.rng.normal(size=shape).astype(np.float32)

    def _parameter(self, *shape: int) -> str:
        name = f"p{len(self.params)}"
        self.params[name] = (0.5 * self.rng.normal(size=shape)).astype(np.float32)
        return name

    # ---- operations on values `(batch, *shape)`; each says which shape it leaves

    def _scale(self) -> Operation:
        name, by = self._parameter(), float(np.float32(self.rng.normal()))
        return lambda p, x: x * p[name] + jnp.asarray(by, x.dtype)

    def _shift(self) -> Operation:
        name = self._parameter(*self.shape)
        return lambda p, x: (x + p[name][None]) * jnp.asarray(0.37, x.dtype)

    def _regression(self) -> Operation | None:
        """What an autoregression leaves: each value less those before it."""
        if self.shape[-1] < 3:
            return None
        name = self._parameter(2)
        self.shape = (*self.shape[:-1], self.shape[-1] - 2)
        return lambda p, x: x[..., 2:] - p[name][0] * x[..., 1:-1] - p[name][1] * x[..., :-2]

    def _slice(self) -> Operation | None:
        if self.shape[-1] < 2:
            return None
        first = int(self.rng.integers(0, 2))
        self.shape = (*self.shape[:-1], self.shape[-1] - 1)
        size = self.shape[-1]
        return lambda p, x: x[..., first : first + size]

    def _gather(self) -> Operation:
        name, count = self._parameter(5), int(self.rng.integers(1, 6))
        picked = self.rng.integers(0, self.shape[-1], count)
        self.shape = (*self.shape[:-1], count)
        index = np.arange(count) % 5
        return lambda p, x: x[..., picked] * p[name][index].reshape((1,) * (x.ndim - 1) + (-1,))

    def _reduce(self) -> Operation | None:
        if len(self.shape) < 2:
            return None
        reduction = [jnp.sum, jnp.mean, jnp.max, jax.nn.logsumexp][self.rng.integers(4)]
        axis = int(self.rng.integers(len(self.shape)))
        self.shape = (*self.shape[:axis], *self.shape[axis + 1 :])
        return lambda p, x: reduction(x, axis=axis + 1)

    def _curve(self) -> Operation:
        curve = [jnp.tanh, jax.nn.sigmoid, jax.nn.relu, jnp.sin, jnp.square, jax.nn.gelu][
            self.rng.integers(6)
        ]
        return lambda p, x: curve(x)

    def _norm(self) -> Operation:
        name = self._parameter(self.shape[-1])

        def normed(p, x):
            mean = jnp.mean(x, axis=-1, keepdims=True)
            spread = jax.lax.rsqrt(
                jnp.mean(jnp.square(x - mean), -1, keepdims=True) + jnp.asarray(0.1, x.dtype)
            )
            return (x - mean) * spread * p[name].reshape((1,) * (x.ndim - 1) + (-1,))

        return normed

    def _dense(self) -> Operation:
        width = int(self.rng.integers(1, 8))
        name = self._parameter(self.shape[-1], width)
        self.shape = (*self.shape[:-1], width)
        return lambda p, x: x @ p[name]

    def _running(self) -> Operation:
        return lambda p, x: jnp.cumsum(x, axis=-1) * jnp.asarray(0.25, x.dtype)

    def _turned(self) -> Operation:
        order = self.rng.permutation(len(self.shape))
        self.shape = tuple(self.shape[i] for i in order)
        return lambda p, x: x.transpose(0, *(int(i) + 1 for i in order))

    # ---- a task

    def init(self, key: jax.Array) -> tuple[dict, dict]:
        state = {"calls": jnp.int32(0)} if self.counts else {}
        return {name: jnp.asarray(value) for name, value in self.params.items()}, state

    def loss(self, params: dict, state: dict, batch: dict, key: jax.Array, train: bool) -> tuple[dict, dict]:
        x = batch["x"].astype(params["p0"].dtype)
        if batch["x"].dtype == jnp.uint8:
            x = x / jnp.asarray(255, x.dtype)
        if self.noisy and train:
            x = x + jnp.asarray(0.1, x.dtype) * jax.random.normal(key, x.shape, x.dtype)
        for operation in self.operations:
            x = operation(params, x)
        if self.target:
            x = x - batch["y"].astype(x.dtype)
        values = jnp.mean(jnp.square(x.reshape(len(x), -1)), axis=1).astype(jnp.float32)
        made = {"loss": cw.Sum.of(values)}
        if self.weighted:
            weights = batch["weight"].astype(jnp.float32)
            made = {"loss": cw.Sum(jnp.sum(values * weights), jnp.sum(weights))}
        if self.measures:
            made["plain"] = cw.Sum.of(values)
        if train and self.counts:
            state = {"calls": state["calls"] + jnp.int32(1)}
        return made, state


FIRST = ("scale", "shift", "regression", "regression", "slice", "gather")
KINDS = (*FIRST, "curve", "reduce", "norm", "dense", "running", "turned")
"""Names of operations of `Net`."""


def _optimizer(rng: np.random.Generator) -> Any:
    rate = float(np.float32(10 ** rng.uniform(-3, -2)))
    return [
        cw.sgd(lr=rate),
        cw.sgd(lr=rate),
        cw.sgd(lr=rate, momentum=0.9, nesterov=True, clip=1.0),
        cw.adam(lr=rate),
        cw.adamw(lr=rate, weight_decay=0.01, clip=0.5),
        cw.recipe.lamb(lr=rate, weight_decay=0.01),
        cw.recipe.lars(lr=rate, clip=1.0),
    ][rng.integers(7)]


def _shift(example: dict, key: jax.Array) -> dict:
    return {**example, "x": jnp.roll(example["x"], jax.random.randint(key, (), 0, 3), axis=-1)}


def recipe(seed: int, steps: int = 20) -> cw.Recipe:
    """The recipe that `seed` draws, of a few steps."""
    rng = np.random.default_rng(seed)
    examples = int(rng.integers(5, 60))
    net = Net(rng, examples)
    replicas, rows = int(rng.integers(1, 9)), int(rng.choice([1, 2, 2, 2, 3, 4, 5]))
    blocks = [n for n in range(1, replicas + 1) if replicas % n == 0]
    task = cw.Task(
        init=net.init,
        loss=net.loss,
        train=cw.Arrays(**net.columns),
        eval=cw.Arrays(**{name: values[: examples // 2 + 1] for name, values in net.columns.items()}),
        augment=_shift if rng.random() < 0.2 else None,
    )
    return cw.Recipe(
        task=task,
        batch=replicas * rows,
        replicas=replicas,
        blocks=int(rng.choice(blocks)) if rng.random() < 0.3 else None,
        duration=f"{steps}st",
        optimizer=_optimizer(rng),
        precision=str(rng.choice(["f32", "f32", "f32", "bf16", "f16", "tf32"])),
        ema=0.9 if rng.random() < 0.2 else None,
        seed=seed,
    )
