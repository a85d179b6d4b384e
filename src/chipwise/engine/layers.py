"""The norms of the layers of the flat vector, and a ratio for each value, for LAMB and LARS.

Every layer begins a row of the vector: `Flat` pads it with zeros, which stay zero and add nothing to norms.
So a row is of one layer, and nothing here gathers or scatters single values:

    lengths   two sums of squares for each row, of its parameters and of what the optimizer measures
    ratios    of all rows, from the norms of their layers, from the lengths of all rows
    moved     each row by its ratio

The first two are programs of their own, `measure` and `ratios`. If the state is sharded, a device measures
its own chunks, and all gather the lengths, at most a 64th of the parameters' bytes. A chunk is measured in
two turns of a loop: the code of a turn does not depend on the number of chunks, and a loop of a single turn
would be inlined. The ratios are made by one program on any number of devices. So bits do not depend on that
number. The update, without sums, is elementwise; in one program with sums, XLA's code for the CPU fused both,
in a way that depended on sizes. It computes again what the optimizer measured, which moves as many bytes as
keeping it would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..recipe.optimizers import Optimizer
from ..recipe.task import Tree
from .flat import Flat

_LANES, _LEAST, _MOST = 128, 128, 65536  # values in a row: of 1,024 on, whole tiles of a TPU
_PADDED = 32  # the part of the vector that padding may add: half of it on average


def rows_of(optimizer: Optimizer, params: Tree, chunks: int) -> tuple[int, list[int] | None]:
    """The arguments `row` and `layers` of `Flat`."""
    if not optimizer.by_layer:
        return 1, None
    layers: list[int] = optimizer.layers(params)  # type: ignore[attr-defined]
    values = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    most = values // (_PADDED * max(sum(layers), 2 * chunks))
    return max(_LEAST, min(_MOST, 1 << max(most, 1).bit_length() - 1)), layers


class Layers:
    """The layers of `flat`.

    *Arguments:* `adapting`: for each leaf whether its layers have a ratio; otherwise it is 1.
    """

    def __init__(self, flat: Flat, adapting: Tree):
        self._row, self._turn, self._dtype = flat.row, flat.chunk // 2, flat.dtype
        self._shape = (flat.row // _LANES, _LANES)  # of a row
        self._rows, bounds = flat.size // flat.row, flat.bounds
        self._first, self._last = bounds[:-1], bounds[1:]
        self._adapting = np.repeat(np.asarray(jax.tree.leaves(adapting), bool), flat.layers)

    def shapes(self, size: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """The shapes of `lengths`, for each turn those of parameters, then the others, and of `ratios`, of
        `size` values."""
        rows = size // self._row
        return jax.ShapeDtypeStruct((2 * rows,), self._dtype), jax.ShapeDtypeStruct((rows,), self._dtype)

    def lengths(self, pair: Callable[..., tuple[Any, Any]], vectors: tuple[Any, ...], size: int) -> jax.Array:
        """The sums of squares of the rows of some chunks, `size` values: see `shapes`.

        *Arguments:* `pair`, an elementwise function of `vectors` with two results; in `vectors`, what is not
        `(size,)` is given to each call.
        """
        leaves, structure = jax.tree.flatten(vectors)
        cut = [i for i, leaf in enumerate(leaves) if np.shape(leaf) == (size,)]
        shape = (size // self._turn, self._turn // self._row, *self._shape)

        def turn(parts: list[jax.Array]) -> jax.Array:
            given = list(leaves)
            for i, part in zip(cut, parts, strict=True):
                given[i] = part
            both = pair(*jax.tree.unflatten(structure, given))
            return jnp.stack([jnp.sum(x * x, axis=(1, 2)) for x in both])

        return lax.map(turn, [leaves[i].reshape(shape) for i in cut]).reshape(-1)

    def ratios(self, optimizer: Any, now: dict[str, jax.Array], lengths: jax.Array) -> jax.Array:
        """The ratio of each row, `(rows,)`, 0 after the last layer, from the `lengths` of all rows."""
        lengths = lengths.reshape(-1, 2, self._turn // self._row).swapaxes(0, 1).reshape(2, 1, self._rows)
        rows = jnp.arange(self._rows, dtype=jnp.int32)[None]
        inside = (rows >= self._first[:, None]) & (rows < self._last[:, None])
        norms = jnp.sqrt(jnp.sum(jnp.where(inside[None], lengths, 0), axis=2))
        ratios = jnp.where(self._adapting, optimizer.ratios(norms[0], norms[1], now), 1)
        return jnp.sum(jnp.where(inside, ratios[:, None], 0), axis=0)  # one is not 0: nothing is rounded

    def moved(self, update: Callable[..., Tree], vectors: tuple[Any, ...], ratios: jax.Array) -> Tree:
        """`update` of `vectors` and, as `ratios`, an array that is broadcast to each: some rows' ratios. It
        is elementwise, and gets vectors as rows."""
        size = ratios.size * self._row

        def shaped(leaf: Any, shape: tuple[int, ...], new: tuple[int, ...]) -> Any:
            return leaf.reshape(new) if np.shape(leaf) == shape else leaf

        rows = (ratios.size, *self._shape)
        given = jax.tree.map(lambda leaf: shaped(leaf, (size,), rows), vectors)
        after = update(*given, ratios=ratios.reshape(-1, 1, 1))
        return jax.tree.map(lambda leaf: shaped(leaf, rows, (size,)), after)
