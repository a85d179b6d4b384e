"""The update: from the sums over all replicas to the next state. Decay and clipping happen here, once.

An elementwise optimizer updates the flat vector of the trained parameters, as the devices hold them. Its bits
do not depend on where the vector is cut (measured on the CPU with AdamW and SGD with Nesterov momentum, cut
into 1 to 1,000 pieces; over a tree of leaves they differ in the last place). All inputs and outputs are
vectors, since the compiler would fuse the slices of a tree's leaves with the arithmetic, which may change the
bits and made the update 3 to 4 times as slow. The norm for clipping is summed chunk by chunk, and the chunks
in tree order. LAMB and LARS need the norms of layers as well: see `engine.layers`. Optimizers that use whole
leaves (Adafactor, Muon, unknown ones) get the tree.
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
from .layers import Layers
from .layout import tree_sum, windows
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
    - `layers`, and the shapes of `measure`'s and `ratios`' results, `lengths` and `by_row`, if the optimizer
      needs norms of layers, otherwise None.
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
        self.squares = jax.ShapeDtypeStruct((chunks,), jnp.float32) if wanted else None
        self.layers: Layers | None = None
        self.lengths: jax.ShapeDtypeStruct | None = None
        self.by_row: jax.ShapeDtypeStruct | None = None
        if recipe.optimizer.by_layer:
            self.layers = Layers(self.flat, recipe.optimizer.decaying(state.params))
            self.lengths, self.by_row = self.layers.shapes(self.flat.size)

    def vector(self, contribution: dict[str, Any]) -> jax.Array:
        """A replica's contribution as the vector `(size,)` float32 that is summed."""
        aside = {name: contribution[name] for name in ("sums", "state")}
        return jnp.concatenate([self.gradient.pack(contribution["grads"]), self.aside.pack(aside)])

    def square(self, total: jax.Array) -> jax.Array:
        """The sums of squares, `(chunks,)` float32, of each chunk of the gradient in `total` `(size,)`, or in
        some chunks of it."""
        chunks = total[: self.flat.size].reshape(-1, self.flat.chunk)
        # One after another, so that the code for a chunk does not depend on the number of chunks
        return lax.map(lambda chunk: jnp.sum(chunk * chunk), chunks)

    def measure(
        self,
        state: TrainState,
        summed: jax.Array,
        beside: jax.Array,
        hyper: dict,
        squares: Any,
        decaying: Any,
    ) -> jax.Array:
        """The lengths of the rows of some chunks, of which `ratios` makes the norms of layers. Arguments as
        of `moved`."""
        assert self.layers is not None
        optimizer: Any = self.recipe.optimizer
        examples, _, now, _, norm = self._inputs(state, beside, hyper, squares)

        def pair(summed: Any, params: Any, moments: Any, decaying: Any) -> tuple[Any, Any]:
            gradient = (summed / examples).astype(self.flat.dtype)
            return optimizer.measured(gradient, moments, params, now, decaying=decaying, norm=norm)

        vectors = (summed, state.params, state.optimizer, decaying)
        return self.layers.lengths(pair, vectors, summed.size)

    def ratios(self, lengths: jax.Array, step: jax.Array, hyper: dict) -> jax.Array:
        """The ratio of each row of the vector, from the lengths of all."""
        assert self.layers is not None
        return self.layers.ratios(self.recipe.optimizer, _at(hyper, step), lengths)

    def __call__(
        self,
        state: TrainState,
        total: jax.Array,
        hyper: dict,
        squares: jax.Array | None,
        ratios: jax.Array | None = None,
    ) -> tuple[TrainState, jax.Array]:
        """The state after a step, without its frozen part, and a token `()` to wait for.

        *Arguments:* `state`, with the vector of `flat` as `params`; `total` `(size,)`, the sum of all
        replicas' vectors; `hyper`, the window's tables and its first step; `squares` `(chunks,)` from
        `square`, and `ratios` `(rows,)`, or None if not used.
        """
        size = self.flat.size
        masks = self.traced_masks()
        return self.moved(state, total[:size], total[size:], hyper, squares, masks, ratios)

    def moved(
        self,
        state: TrainState,
        summed: jax.Array,
        beside: jax.Array,
        hyper: dict,
        squares: jax.Array | None,
        masks: dict[str, Any],
        ratios: jax.Array | None = None,
    ) -> tuple[TrainState, jax.Array]:
        """The update of some chunks; the state of an optimizer of the vector has the same chunks.

        *Arguments:* `summed`, the sum of the gradients in these chunks; `beside`, the sum of the values after
        the gradient in the vector; `masks` and `ratios` of these chunks.
        """
        recipe, optimizer, flat = self.recipe, self.recipe.optimizer, self.flat
        examples, aside, now, square, norm = self._inputs(state, beside, hyper, squares)
        gradient = summed / examples
        if optimizer.on_vector:
            vectors = (gradient.astype(flat.dtype), state.optimizer, state.params)
            params, moments = self._moved(
                vectors, now, masks.get("decaying", self.decays), norm, masks.get("members"), ratios
            )
            if flat.rounds:
                params = flat.pack(flat.unpack(params))
        else:
            tree, gradients = flat.unpack(state.params), self.gradient.unpack(gradient)
            tree, moments = optimizer.update(gradients, state.optimizer, tree, now, norm=norm)
            params = flat.pack(tree)
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

    def _moved(
        self, vectors: tuple[Any, ...], now: dict, decaying: Any, norm: Any, members: Any, ratios: Any
    ) -> tuple[Any, Any]:
        """Parameters and optimizer's state after the update of `vectors`: gradient, state, parameters."""
        optimizer: Any = self.recipe.optimizer
        if self.layers is None:
            return optimizer.update(*vectors, now, decaying=decaying, norm=norm, members=members)

        def update(gradient: Any, moments: Any, params: Any, decaying: Any, ratios: Any) -> tuple[Any, Any]:
            return optimizer.update(
                gradient, moments, params, now, decaying=decaying, norm=norm, ratios=ratios
            )

        return self.layers.moved(update, (*vectors, decaying), ratios)

    def _inputs(
        self, state: TrainState, beside: jax.Array, hyper: dict, squares: Any
    ) -> tuple[jax.Array, dict, dict, Any, Any]:
        """The number of examples, the sums beside the gradient, the step's hyperparameters, and the
        gradient's sum of squares and norm, or None for each that is not used."""
        aside = self.aside.unpack(beside)
        examples = aside["sums"]["loss"].count
        now = _at(hyper, state.step)
        norm, square = None, None
        if squares is not None:
            square = tree_sum([squares[i] for i in range(squares.size)], jnp.add)
        if square is not None and self._clips:
            norm = jnp.sqrt(square) / examples
        return examples, aside, now, square, norm

    @property
    def decays(self) -> bool | None:
        """Whether all values of the vector decay (true) or none (false); `None` if only some do."""
        chosen = set(jax.tree.leaves(self.recipe.optimizer.decaying(self._params)))
        return (bool(chosen.pop()) if chosen else True) if len(chosen) < 2 else None

    def masks(self) -> dict[str, tuple[Any, Tree]]:
        """The arguments of `moved` that differ between values of the vector: for each of `decaying` (whether
        they decay) and `members` (their group), the dtype and the value for each leaf of the parameters."""
        optimizer = self.recipe.optimizer
        masks: dict[str, tuple[Any, Tree]] = {}
        if self.decays is None:
            masks["decaying"] = (np.bool_, optimizer.decaying(self._params))
        if optimizer.patterns:
            masks["members"] = (np.int8, optimizer.members(self._params))
        return masks

    def traced_masks(self) -> dict[str, jax.Array]:
        """`masks` of the whole vector, each `(flat.size,)`."""
        return {name: self._spread(jnp, *mask) for name, mask in self.masks().items()}

    def host_masks(self) -> dict[str, np.ndarray]:
        """`masks` as NumPy arrays, each `(flat.size,)`."""
        return {name: self._spread(np, *mask) for name, mask in self.masks().items()}

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
        return flat.pack_host(spread) if numpy is np else flat.pack(spread)

    def _averaged(self, ema: jax.Array, params: jax.Array) -> jax.Array:
        """`ema + (1 - decay) * (params - ema)`, so that the average of a constant is exactly that
        constant."""
        step = jnp.asarray(1 - (self.recipe.ema or 0.0), ema.dtype)
        return ema + step * (params - ema)


WORTH_BYTES = 16 << 20
"""Savings on each device from which the optimizer's state is sharded by default. Each step then starts a few
more programs, which slows down small models."""


def shares_out(recipe: Recipe, state: TrainState, devices: int, wanted: bool | None) -> bool:
    """Whether to shard the optimizer's state over `devices`: if `wanted`, or by default if each device saves
    `WORTH_BYTES`. Only if it changes no bits, so the optimizer must be of the vector and round no parameter.

    *Arguments:* `state`, as arrays or shapes.
    """
    if wanted is False or devices == 1 or not recipe.optimizer.on_vector:
        return False
    if flat_of(recipe, state.params).rounds:
        return False
    chunks = recipe.replicas
    saved = nbytes((state.optimizer, state.ema)) * (chunks - windows(chunks, devices)[0]) // chunks
    return bool(wanted) or saved >= WORTH_BYTES


def _at(hyper: dict, step: jax.Array) -> dict[str, jax.Array]:
    """The hyperparameters of a step."""
    return {name: table[step - hyper["start"]] for name, table in hyper["tables"].items()}


def _added(old: Tree, new: Tree) -> Tree:
    """The sum of two trees, leaf by leaf, in the structure of `old`. Not with `jax.tree.map`, which sees two
    structures if the loss makes a new `finish` function in each trace."""
    leaves, structure = jax.tree.flatten(old)
    return jax.tree.unflatten(structure, [a + b for a, b in zip(leaves, jax.tree.leaves(new), strict=True)])
