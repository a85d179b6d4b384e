"""The update: from the sums over all replicas to the next state. Decay and clipping happen here, once.

An elementwise optimizer updates the flat vector of the trained parameters, as the devices hold them. Its bits
do not depend on where the vector is cut (measured on the CPU with AdamW and SGD with Nesterov momentum, cut
into 1 to 1,000 pieces; over a tree of leaves they differ in the last place). All inputs and outputs are
vectors, since the compiler would fuse the slices of a tree's leaves with the arithmetic, which may change the
bits and made the update 3 to 4 times as slow. The norm for clipping is summed chunk by chunk, and the chunks
in tree order. Optimizers that need whole leaves (LAMB, LARS, Muon, optax's unless said otherwise) update leaf
by leaf, and the norm is summed so: see `engine.leaves`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import RecipeError
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from . import scaling
from .flat import Flat
from .layout import Ranges, tree_sum
from .leaves import Leaves, OwnLeaves
from .replica import from_sums, summable
from .state import TrainState, flat_of, nbytes


class Update:
    """The update of `recipe`'s state. All methods are pure functions of arrays.

    *Arguments:* `state`, as arrays or shapes.

    *Fields:*

    - `whole`, the layout of the vector of all parameters, and `flat`, of a device's part (the same without
      `shards`).
    - The vector that is summed over replicas: `gradient`, the layout of the gradient, with which it begins;
      `aside`, that of the metric sums and the task's state, which follow; and its `size` on a device.
    - `squares`, the shape of `square`'s result if the norm is clipped or the loss scaled, otherwise None.
    """

    def __init__(self, recipe: Recipe, state: TrainState):
        self.recipe, self._params = recipe, state.params
        self.whole = flat_of(recipe, state.params)
        self.flat = self.whole.local
        self.gradient = self.whole.widened(jnp.dtype(jnp.float32))  # the dtype of the sum
        summed = jax.eval_shape(lambda s: summable(s, jnp.int32(0), recipe.replicas), state.state)
        self.aside = Flat({"sums": state.sums, "state": summed})
        self.size = self.flat.size + self.aside.size
        self._clips = "clip" in recipe.optimizer.hyper
        wanted = self._clips or recipe.precision == "f16"
        chunks = recipe.replicas * recipe.shards
        if not recipe.optimizer.elementwise:
            chunks = sum(recipe.optimizer.layers(state.params))
        self.squares = jax.ShapeDtypeStruct((chunks,), jnp.float32) if wanted else None

    @functools.cached_property
    def leaves(self) -> Leaves | None:
        """How the optimizer updates leaf by leaf; None if it is elementwise."""
        optimizer, one = self.recipe.optimizer, jax.ShapeDtypeStruct((), jnp.float32)
        given = dict.fromkeys(optimizer.hyper, one), one if self._clips else None
        return None if optimizer.elementwise else Leaves(optimizer, self.flat, given)

    def windows(self, groups: int) -> tuple[Ranges, Ranges]:
        """The parts of the vector that `groups` devices update, and those of its squares."""
        if self.leaves is not None:
            return self.leaves.windows(groups)
        return Ranges.even(self.flat.chunks, groups, self.flat.chunk), Ranges.even(self.flat.chunks, groups)

    def vector(self, contribution: dict[str, Any]) -> jax.Array:
        """A replica's contribution as the vector `(size,)` float32 that is summed."""
        aside = {name: contribution[name] for name in ("sums", "state")}
        return jnp.concatenate([self.gradient.pack(contribution["grads"]), self.aside.pack(aside)])

    def square(self, total: jax.Array, part: OwnLeaves | None = None) -> jax.Array:
        """The sums of squares, float32, of each chunk or row of the gradient in `total` `(size,)`, or of the
        chunks in a window of it; of a `part` by leaf, the window of `windows` with its own."""
        if self.leaves is not None:
            return self.leaves.squares(total, part)
        chunks = total[: self.flat.size].reshape(-1, self.flat.chunk)
        # One after another, so that the code for a chunk does not depend on the number of chunks
        return lax.map(lambda chunk: jnp.sum(chunk * chunk), chunks)

    def __call__(
        self, state: TrainState, summed: jax.Array, beside: jax.Array, hyper: dict, squares: jax.Array | None,
        masks: dict[str, Any], part: OwnLeaves | None = None,
    ) -> tuple[TrainState, jax.Array]:  # fmt: skip
        """The state after a step, without its frozen part, and a token `()` to wait for; or a device's part.

        *Arguments:* `state`, with the vector of `flat` as `params`, or a window of it, of which the
        optimizer's state is too; `summed`, the sum of the gradients in the window; `beside`, the sum of the
        values after the gradient in the vector; `hyper`, the tables of the steps' window and its first step;
        `squares` from `square`, or None; `masks` of the window; `part`, by leaf, if it is not the whole.
        """
        recipe, optimizer, flat, leaves = self.recipe, self.recipe.optimizer, self.flat, self.leaves
        aside = self.aside.unpack(beside)
        examples, now, norm, square = aside["sums"]["loss"].count, _at(hyper, state.step), None, None
        if squares is not None:
            square = tree_sum([squares[i] for i in range(squares.size)], jnp.add)
            norm = jnp.sqrt(square) / examples if self._clips else None
        gradient = summed / examples
        if leaves is None:
            params, moments = optimizer.update(
                gradient.astype(flat.dtype), state.optimizer, state.params, now,
                decaying=masks.get("decaying", self.decays), norm=norm, members=masks.get("members"),
            )  # fmt: skip
            if flat.rounds:
                params = flat.pack(flat.unpack(params))
        else:
            params, moments = leaves.update(
                gradient, state.optimizer, state.params, (now, norm), state.step, part
            )
        step = state.step + jnp.int32(1)
        after = TrainState(
            step=step,
            params=params,
            frozen=None,
            state=from_sums(state.state, aside["state"], recipe.replicas, recipe.block_count),
            optimizer=moments,
            ema=None if state.ema is None else self._averaged(state.ema, params),
            sums=_added(state.sums, aside["sums"]),
        )
        if square is not None and state.scale is not None:
            after = scaling.unless_overflown(state, after, square)
        return after, step

    @property
    def decays(self) -> bool | None:
        """Whether all values of the vector decay (true) or none (false); `None` if only some do."""
        chosen = set(jax.tree.leaves(self.recipe.optimizer.decaying(self._params)))
        return (bool(chosen.pop()) if chosen else True) if len(chosen) < 2 else None

    def masks(self) -> dict[str, tuple[Any, Tree]]:
        """What differs between values of the vector in an elementwise update: for each of `decaying` (whether
        they decay) and `members` (their group), the dtype and the value for each leaf of the parameters."""
        optimizer = self.recipe.optimizer
        masks: dict[str, tuple[Any, Tree]] = {}
        if optimizer.elementwise and self.decays is None:
            masks["decaying"] = (np.bool_, optimizer.decaying(self._params))
        if optimizer.patterns:
            masks["members"] = (np.int8, optimizer.members(self._params))
        return masks

    def spread(self, numpy: Any = jnp) -> dict[str, Any]:
        """`masks` of the whole vector, each `(flat.size,)`: traced, or arrays of `numpy`."""
        return {name: self._spread(numpy, *mask) for name, mask in self.masks().items()}

    def _spread(self, numpy: Any, dtype: Any, leaves: Tree) -> Any:
        if self.recipe.shards > 1:  # a mask of rows must be the same on every device

            def fits(value: Any, leaf: Any) -> bool:
                shape = np.shape(value)
                return len(shape) in (0, leaf.ndim) and shape[:1] in ((), leaf.shape[:1])

            if not all(jax.tree.leaves(jax.tree.map(fits, leaves, self.flat.tree))):
                patterns = self.recipe.optimizer.patterns
                raise RecipeError(
                    "shards-rows",
                    "A pattern of {patterns:list} selects some rows of a stacked parameter, which "
                    "shards={shards} splits along these rows: name another axis in Task.sharding, or leave "
                    "the rows together.",
                    shards=self.recipe.shards,
                    patterns=patterns,
                )
        spread = jax.tree.map(
            lambda value, leaf: numpy.full(leaf.shape, value, dtype), leaves, self.flat.tree
        )
        flat = self.flat.of(spread, dtype)
        return flat.pack(spread, numpy)

    def _averaged(self, ema: jax.Array, params: jax.Array) -> jax.Array:
        """`ema + (1 - decay) * (params - ema)`, so that the average of a constant is exactly that
        constant."""
        step = jnp.asarray(1 - (self.recipe.ema or 0.0), ema.dtype)
        return ema + step * (params - ema)


WORTH_BYTES = 16 << 20
"""Savings on each device from which the optimizer's state is sharded by default. Each step then starts a few
more programs, which slows down small models."""


def shares_out(updates: Update, state: TrainState, devices: int, wanted: bool | None) -> bool:
    """Whether to shard the optimizer's state over `devices`: if `wanted`, or by default if each device saves
    `WORTH_BYTES`. Only if it changes no bits: leaves must be `apart`, or the vector rounded for none.

    *Arguments:* `state`, as arrays or shapes.
    """
    if wanted is False or devices == 1 or updates.recipe.shards > 1:
        return False
    if updates.flat.rounds if updates.leaves is None else not updates.leaves.apart:
        return False
    size, part = updates.flat.size, updates.windows(devices)[0].part
    return bool(wanted) or nbytes((state.optimizer, state.ema)) * (size - part) // size >= WORTH_BYTES


def _at(hyper: dict, step: jax.Array) -> dict[str, jax.Array]:
    """The hyperparameters of a step."""
    return {name: table[step - hyper["start"]] for name, table in hyper["tables"].items()}


def _added(old: Tree, new: Tree) -> Tree:
    """The sum of two trees, leaf by leaf, in the structure of `old`. Not with `jax.tree.map`, which sees two
    structures if the loss makes a new `finish` function in each trace."""
    leaves, structure = jax.tree.flatten(old)
    return jax.tree.unflatten(structure, [a + b for a, b in zip(leaves, jax.tree.leaves(new), strict=True)])
