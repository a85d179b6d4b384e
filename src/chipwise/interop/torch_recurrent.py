"""PyTorch's recurrent layers as loops of the compiled program: torchax would write out every time
step, which takes a second of compiling for each."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def override(env: Any, torch: Any) -> None:
    """Gives torchax's `env` the functions of `torch.nn.LSTM`, `GRU` and `RNN`."""
    cells = {"lstm": _lstm, "gru": _gru}
    cells |= {f"rnn_{f.__name__}": functools.partial(_plain, f) for f in (jnp.tanh, jax.nn.relu)}
    for name, cell in cells.items():
        env.override_op_definition(getattr(torch, name), functools.partial(_layers, env, cell))
    env.override_op_definition(torch._pack_padded_sequence, functools.partial(_pack, env))
    env.override_op_definition(torch._pad_packed_sequence, functools.partial(_pad, env))


_READ = (
    "a packed sequence, which keeps its padding here, is for recurrent layers alone: read"
    " pad_packed_sequence(packed, total_length=x.shape[1])"
)
_WIDTH = "pad_packed_sequence of lengths from the data needs total_length=x.shape[1]"


class _Width(int):
    """The padded width of a batch whose longest example is not known."""


@functools.cache
def _packed() -> tuple[type, type]:
    import torch
    from torchax import tensor
    from torchax.ops import mappings

    class Rows(tensor.Tensor):
        """The `rows` `(time * batch, ...)` of a packed batch, with its padding. What else is asked
        of them would count that."""

        rows: jax.Array
        ndim = property(lambda self: self.rows.ndim)
        dtype = property(lambda self: mappings.j2t_dtype(self.rows.dtype))
        numel = nelement = __len__ = lambda self: self.jax().size

        @property
        def _elem(self) -> jax.Array:
            raise NotImplementedError(_READ)

        @_elem.setter
        def _elem(self, rows: jax.Array) -> None:
            self.rows = rows

        def size(self, dim: int | None = None) -> Any:
            return self.rows.shape[-1] if dim == -1 else self.shape

        def detach(self) -> Rows:
            return Rows(lax.stop_gradient(self.rows), self._env)

    class Sizes(torch.Tensor):
        """The sizes of a packed batch's steps. Only the first is known, the batch. `lengths`: those
        of the examples `(batch,)`."""

        lengths: jax.Array
        time: int
        batch: int
        device = torch.device("cpu")

        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            raise NotImplementedError(_READ)

        def __getitem__(self, at: Any) -> Any:
            if isinstance(at, int) and at == 0:
                return self.batch
            raise NotImplementedError(_READ)

        def size(self, dim: Any = None) -> Any:
            if dim != 0 or sys._getframe(1).f_globals["__name__"] != "torch.nn.utils.rnn":
                raise NotImplementedError(_READ)
            known = not isinstance(self.lengths, jax.core.Tracer)
            return self.time if known else _Width(self.time)

        def __len__(self) -> int:
            raise NotImplementedError(_READ)

    return Rows, Sizes


def _pack(env: Any, x: Any, lengths: Any, batch_first: bool) -> Any:
    """Packs nothing: the rows stay where they are, since a program has one shape."""
    import torch

    made, sized = _packed()
    rows, each = x.jax(), lengths.jax()
    rows = rows.swapaxes(0, 1) if batch_first else rows
    if not isinstance(each, jax.core.Tracer):
        rows = rows[: int(np.asarray(each).max())]
    with torch.utils._mode_utils.no_dispatch():
        sizes: Any = torch.empty(0).as_subclass(sized)
    sizes.lengths, (sizes.time, sizes.batch) = each, rows.shape[:2]
    return made(rows.reshape(-1, *rows.shape[2:]), env), sizes


def _pad(
    env: Any, data: Any, sizes: Any, batch_first: bool, padding_value: float, total_length: int
) -> Any:
    if isinstance(total_length, _Width):
        raise NotImplementedError(_WIDTH)
    rows, time = data.rows, sizes.time
    rows = rows.reshape(time, -1, *rows.shape[1:])
    there = jnp.arange(time)[:, None] < sizes.lengths
    rows = jnp.where(there.reshape(*there.shape, *[1] * (rows.ndim - 2)), rows, padding_value)
    ends = [(0, total_length - time)] + [(0, 0)] * (rows.ndim - 1)
    rows = jnp.pad(rows, ends, constant_values=padding_value)
    return env.j2t_iso((rows.swapaxes(0, 1) if batch_first else rows, sizes.lengths))


def _layers(
    env: Any,
    cell: Callable,
    inputs: Any,
    *settings: Any,
) -> Any:
    """`torch.lstm` and the like: outputs `(time, batch, directions * size)` and the last states."""
    lengths = getattr(settings[0], "lengths", None)
    if lengths is None:
        *given, batch_first = settings
        x = inputs.jax().swapaxes(0, 1) if batch_first else inputs.jax()
    else:
        sizes, *given = settings
        batch_first = False
        x = inputs.rows.reshape(sizes.time, -1, inputs.rows.shape[-1])
    first, weights, has_biases, num_layers, dropout, train, bidirectional = given
    several = isinstance(first, (tuple, list))  # an LSTM has two states
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
            over = x @ w_in.T + b_in
            if lengths is not None:
                over = (over, jnp.arange(len(x))[:, None] < lengths)
                step = functools.partial(_where, step)
            ends, out = lax.scan(step, [s[at] for s in states], over, reverse=bool(direction))
            outputs.append(out)
            for those, end in zip(last, ends, strict=True):
                those.append(end)
        x = jnp.concatenate(outputs, axis=-1)
        if train and dropout and layer + 1 < num_layers:
            kept = env.draw("uniform", x.shape).jax() < 1 - dropout
            x = jnp.where(kept, x / (1 - dropout), jnp.zeros_like(x))
    ended = [jnp.stack(those) for those in last]
    if lengths is not None:
        return _packed()[0](x.reshape(-1, x.shape[-1]), env), *env.j2t_iso(ended)
    return env.j2t_iso((x.swapaxes(0, 1) if batch_first else x, *ended))


def _where(step: Callable, states: list[jax.Array], over: Any) -> Any:
    """A step of those examples that are as long. The others keep their states."""
    x, there = over
    new, out = step(states, x)
    there = there[:, None]
    kept = [jnp.where(there, a, b) for a, b in zip(new, states, strict=True)]
    return kept, jnp.where(there, out, 0.0)


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
