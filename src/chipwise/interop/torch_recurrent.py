"""PyTorch's recurrent layers as loops of the compiled program: torchax would write out every time
step, which takes a second of compiling for each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def override(env: Any, torch: Any) -> None:
    """Gives torchax's `env` the functions of `torch.nn.LSTM`, `GRU` and `RNN`."""
    cells = {"lstm": _lstm, "gru": _gru}
    cells |= {f"rnn_{f.__name__}": functools.partial(_plain, f) for f in (jnp.tanh, jax.nn.relu)}
    for name, cell in cells.items():
        env.override_op_definition(getattr(torch, name), functools.partial(_layers, env, cell))


def _layers(
    env: Any,
    cell: Callable,
    inputs: Any,
    first: Any,
    weights: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """`torch.lstm` and the like: outputs `(time, batch, directions * size)` and the last states."""
    several = isinstance(first, (tuple, list))  # an LSTM has two states
    x = inputs.jax().swapaxes(0, 1) if batch_first else inputs.jax()
    states = [state.jax() for state in (first if several else (first,))]
    directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * directions)
    last: list[list[jax.Array]] = [[] for _ in states]
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            w_in, w_hidden, *more = (w.jax() for w in weights[at * each : (at + 1) * each])
            b_in, b_hidden = more[:2] if has_biases else (0.0, 0.0)
            projection = more[-1] if len(more) % 2 else None
            step = functools.partial(cell, w_hidden, b_hidden, projection)
            # The product with the inputs of all time steps is one; only the hidden state's is in
            # the loop
            ends, out = lax.scan(
                step, [s[at] for s in states], x @ w_in.T + b_in, reverse=bool(direction)
            )
            outputs.append(out)
            for those, end in zip(last, ends, strict=True):
                those.append(end)
        x = jnp.concatenate(outputs, axis=-1)
        if train and dropout and layer + 1 < num_layers:
            kept = env.draw("uniform", x.shape).jax() < 1 - dropout
            x = jnp.where(kept, x / (1 - dropout), jnp.zeros_like(x))
    ended = [jnp.stack(those) for those in last]
    return env.j2t_iso((x.swapaxes(0, 1) if batch_first else x, *ended))


def _lstm(w: Any, b: Any, projection: Any, states: list[jax.Array], x: jax.Array) -> Any:
    h, c = states
    i, f, g, o = jnp.split(x + h @ w.T + b, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    h = h if projection is None else h @ projection.T
    return [h, c], h


def _gru(w: Any, b: Any, _: Any, states: list[jax.Array], x: jax.Array) -> Any:
    (h,) = states
    reset, update, new = jnp.split(x, 3, axis=-1)
    reset_h, update_h, new_h = jnp.split(h @ w.T + b, 3, axis=-1)
    update = jax.nn.sigmoid(update + update_h)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + reset_h) * new_h)
    h = (1 - update) * new + update * h
    return [h], h


def _plain(
    activation: Callable, w: Any, b: Any, _: Any, states: list[jax.Array], x: jax.Array
) -> Any:
    h = activation(x + states[0] @ w.T + b)
    return [h], h
