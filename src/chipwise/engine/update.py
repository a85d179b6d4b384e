"""From the sums over all replicas to the next state. Decay and clipping act here, once.

An elementwise optimizer works on the flat vector of the trained parameters, which is how the devices hold
them: where the vector is cut changes no bit (measured on the CPU with AdamW and SGD with Nesterov momentum,
cut into 1 to 1,000 pieces; over a tree of leaves they differ in the last place). In and out of the program go
vectors alone, since what a compiler fuses into the arithmetic, such as the slices of a tree's leaves, may
change its bits and made the update 3 to 4 times as slow. The norm for clipping is summed chunk by chunk, and
the chunks in the tree. Optimizers that look at whole leaves (LAMB, LARS, Adafactor, Muon, unknown ones) get
the tree.
"""

from __future__ import annotations

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
from .layout import tree_sum
from .replica import from_sums, summable
from .state import TrainState, flat_of, nbytes


class Update:
    """The update of `recipe`'s state. All methods are pure functions of arrays.

    *Arguments:* `state`, as arrays or shapes.

    *Fields:* `flat`: how the parameters lie in the vector that is summed, which begins with their gradient;
    where the recipe has `shards`, a device's part of the parameters, of which `whole` are all;
    `gradient`: how the gradient lies there; `aside`: how the metric sums and the task's state lie behind it;
    `size` of that vector; `squares`: the shape of what `square` gives, where the norm is clipped or the loss
    scaled, otherwise None.
    """

    def __init__(self, recipe: Recipe, state: TrainState):
        self.recipe, self._params = recipe, state.params
        self.whole = flat_of(recipe, state.params)
        self.flat = self.whole.local
        self.gradient = self.whole.widened(jnp.dtype(jnp.float32))  # as it is summed
        summed = jax.eval_shape(lambda s: summable(s, jnp.int32(0), recipe.replicas), state.state)
        self.aside = Flat({"sums": state.sums, "state": summed})
        self.size = self.flat.size + self.aside.size
        self._clips = "clip" in recipe.optimizer.hyper
        wanted = self._clips or recipe.precision == "f16"
        chunks = recipe.replicas * recipe.shards
        self.squares = jax.ShapeDtypeStruct((chunks,), jnp.float32) if wanted else None

    def vector(self, contribution: dict[str, Any]) -> jax.Array:
        """What a replica contributes, as the vector `(size,)` float32 that is summed."""
        aside = {name: contribution[name] for name in ("sums", "state")}
        return jnp.concatenate([self.gradient.pack(contribution["grads"]), self.aside.pack(aside)])

    def square(self, total: jax.Array) -> jax.Array:
        """`(chunks,)` float32: the sum of squares of each chunk of the gradient in `total` `(size,)`, or in
        some chunks of it."""
        chunks = total[: self.flat.size].reshape(-1, self.flat.chunk)
        # One after another, so that a chunk's sum is the same program wherever and however many there are
        return lax.map(lambda chunk: jnp.sum(chunk * chunk), chunks)

    def __call__(
        self, state: TrainState, total: jax.Array, hyper: dict, squares: jax.Array | None
    ) -> tuple[TrainState, jax.Array]:
        """The state after a step, without its frozen part, and a token `()` to wait for.

        *Arguments:* `state`, with the vector of `flat` as `params`; `total` `(size,)`, the sum of all
        replicas' vectors; `hyper`, the window's tables and its first step; `squares` `(chunks,)` as of
        `square`, or None where nobody asks for them.
        """
        size = self.flat.size
        masks = {name: self._spread(jnp, *mask) for name, mask in self.masks().items()}
        decaying = masks.get("decaying", self.decays)
        return self.moved(state, total[:size], total[size:], hyper, squares, decaying, masks.get("members"))

    def moved(
        self,
        state: TrainState,
        summed: jax.Array,
        beside: jax.Array,
        hyper: dict,
        squares: jax.Array | None,
        decaying: Any,
        members: Any = None,
    ) -> tuple[TrainState, jax.Array]:
        """The same of some chunks, where an elementwise optimizer's state has as many: `summed`, the sum of
        the gradients there, and `beside`, what lies behind them in the vector; `decaying` and `members`
        there, as of `masks` or for all values."""
        recipe, optimizer, flat = self.recipe, self.recipe.optimizer, self.flat
        aside = self.aside.unpack(beside)
        examples = aside["sums"]["loss"].count
        now = {name: table[state.step - hyper["start"]] for name, table in hyper["tables"].items()}
        norm, square = None, None
        if squares is not None:
            square = tree_sum([squares[i] for i in range(squares.size)], jnp.add)
        if square is not None and self._clips:
            norm = jnp.sqrt(square) / examples
        gradient = summed / examples
        if optimizer.elementwise:
            params, moments = optimizer.update(
                gradient.astype(flat.dtype),
                state.optimizer,
                state.params,
                now,
                decaying=decaying,
                norm=norm,
                members=members,
            )
            if flat.rounds:
                params = flat.pack(flat.unpack(params))
        else:
            tree, gradients = flat.unpack(state.params), self.gradient.unpack(gradient)
            tree, moments = optimizer.update(gradients, state.optimizer, tree, now, norm=norm)
            params = flat.pack(tree)
        done = state.step + jnp.int32(1)
        after = TrainState(
            step=done,
            params=params,
            frozen=None,
            state=from_sums(state.state, aside["state"], recipe.replicas, recipe.block_count),
            optimizer=moments,
            ema=None if state.ema is None else self._averaged(state.ema, params),
            sums=_added(state.sums, aside["sums"]),
        )
        if square is not None and state.scale is not None:
            after = scaling.unless_overflown(state, after, square)
        return after, done

    @property
    def decays(self) -> bool | None:
        """Whether all values of the vector decay; `None` for some of them."""
        chosen = set(jax.tree.leaves(self.recipe.optimizer.decaying(self._params)))
        return (bool(chosen.pop()) if chosen else True) if len(chosen) < 2 else None

    def masks(self) -> dict[str, tuple[Any, Tree]]:
        """What the values of the vector differ in: for each of `decaying` and `members` that `moved` needs as
        an array, its dtype and its number for each leaf of the parameters."""
        optimizer = self.recipe.optimizer
        found: dict[str, tuple[Any, Tree]] = {}
        if self.decays is None:
            found["decaying"] = (np.bool_, optimizer.decaying(self._params))
        if optimizer.patterns:
            found["members"] = (np.int8, optimizer.members(self._params))
        return found

    def host_masks(self) -> dict[str, np.ndarray]:
        """`masks`, each `(flat.size,)`."""
        return {name: self._spread(np, *mask) for name, mask in self.masks().items()}

    def _spread(self, numpy: Any, dtype: Any, leaves: Tree) -> Any:
        if self.recipe.shards > 1:  # what is of some rows must be the same on every device
            fits = jax.tree.map(lambda one, leaf: np.ndim(one) in (0, leaf.ndim), leaves, self.flat.tree)
            cut = jax.tree.map(
                lambda one, leaf: np.shape(one)[:1] in ((), leaf.shape[:1]), leaves, self.flat.tree
            )
            if not all(jax.tree.leaves((fits, cut))):
                raise RecipeError(
                    "shards-rows", shards=self.recipe.shards, patterns=self.recipe.optimizer.patterns
                )
        spread = jax.tree.map(lambda one, leaf: numpy.full(leaf.shape, one, dtype), leaves, self.flat.tree)
        flat = Flat(spread, self.flat.chunks, dtype)
        return flat.pack_host(spread) if numpy is np else flat.pack(spread)

    def _averaged(self, ema: jax.Array, params: jax.Array) -> jax.Array:
        """`ema + (1 - decay) * (params - ema)`, so that what does not change stays exactly itself."""
        step = jnp.asarray(1 - (self.recipe.ema or 0.0), ema.dtype)
        return ema + step * (params - ema)


WORTH_BYTES = 16 << 20
"""Saved on each device, from which the optimizer's state is shared out unasked: each step starts a few
programs more for it, which small models feel."""


def shares_out(recipe: Recipe, state: TrainState, devices: int, wanted: bool | None) -> bool:
    """Whether `devices` share out the optimizer's state: where that is `wanted`, or by default where each
    saves much, and where it changes no bit: the optimizer is elementwise and no parameter is rounded.

    *Arguments:* `state`, as arrays or shapes.
    """
    if wanted is False or devices == 1 or not recipe.optimizer.elementwise:
        return False
    if flat_of(recipe, state.params).rounds:
        return False
    saved = nbytes((state.optimizer, state.ema)) * (devices - 1) // devices
    return bool(wanted) or saved >= WORTH_BYTES


def _added(old: Tree, new: Tree) -> Tree:
    """Leaf by leaf, as `old` is built: a `finish` made inside the loss is a new function in every trace,
    which `jax.tree.map` takes for another structure."""
    leaves, structure = jax.tree.flatten(old)
    return jax.tree.unflatten(structure, [a + b for a, b in zip(leaves, jax.tree.leaves(new), strict=True)])
