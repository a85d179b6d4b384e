"""Updates the state from the sums over all replicas. Decay and clipping happen here, once.

An elementwise optimizer updates the flat vector of the trained parameters, which the devices store.
Optimizers that need whole leaves (LAMB, LARS, Muon, and those of optax by default) update leaf by
leaf, and the norm is summed leaf by leaf too (see `step.leaves`).
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ..base import RecipeError
from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from . import scaling
from .flat import Flat
from .layout import Ranges, tree_sum
from .leaves import Leaves, OwnLeaves
from .replica import from_sums, summable
from .state import TrainState, flat_of, nbytes
from .window import WindowHyper


class Update:
    """The update of `recipe`'s state. All methods are pure functions of arrays.

    *Arguments:* `state` has arrays or shapes.

    *Fields:*

    - `whole`: the layout of the vector of all parameters.
    - `flat`: the layout of a device's part of that vector. Without `shards` it is the same.
    - `gradient`: the layout of the gradient, with which the vector that is summed over replicas
      begins.
    - `aside`: the layout of the metric sums and the task's state, which follow the gradient in that
      vector.
    - `size`: the size of that vector on a device.
    - `squares`: the shape of `square`'s result if the norm is clipped or the loss scaled, otherwise
      `None`.
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
        """The update of the optimizer leaf by leaf, or `None` if it is elementwise."""
        optimizer = self.recipe.optimizer
        one: Any = jax.ShapeDtypeStruct((), jnp.float32)
        extra = dict.fromkeys(optimizer.hyper, one), one if self._clips else None
        return None if optimizer.elementwise else Leaves(optimizer, self.flat, extra)

    def windows(self, groups: int) -> tuple[Ranges, Ranges]:
        """The parts of the vector that `groups` devices update, and those of its squares."""
        if self.leaves is not None:
            return self.leaves.windows(groups)
        return Ranges.even(self.flat.chunks, groups, self.flat.chunk), Ranges.even(
            self.flat.chunks, groups
        )

    def vector(self, contribution: dict[str, Any]) -> Array:
        """Packs a replica's contribution into the vector `(size,)` float32 that is summed."""
        aside = {name: contribution[name] for name in ("sums", "state")}
        return jnp.concatenate([self.gradient.pack(contribution["grads"]), self.aside.pack(aside)])

    def square(self, total: Array, part: OwnLeaves | None = None) -> Array:
        """The sums of squares, float32, of each chunk or row of the gradient in `total`, which is
        the vector `(size,)` or a window of chunks. With a `part` by leaf, the result is a window of
        `windows` that contains the sums of the part's rows."""
        if self.leaves is not None:
            return self.leaves.squares(total, part)
        chunks = total[: self.flat.size].reshape(-1, self.flat.chunk)
        # In a loop, so that the code for a chunk does not depend on the number of chunks
        return lax.map(lambda chunk: jnp.sum(chunk * chunk), chunks)

    def __call__(
        self,
        state: TrainState,
        summed: Array,
        beside: Array,
        hyper: WindowHyper,
        squares: Array | None,
        masks: dict[str, Array],
        part: OwnLeaves | None = None,
    ) -> tuple[TrainState, Array]:
        """Returns the state after a step, or a device's part of it, and a token `()` to wait for.
        The state lacks its frozen part.

        *Arguments:*

        - `state`: its `params` are the vector of `flat`, or a window of it. The optimizer's state
          is that of the same values.
        - `summed`: the sum of the gradients in the window.
        - `beside`: the sum of the values after the gradient in the vector.
        - `hyper`: the tables of the steps' window, and its first step.
        - `squares`: the result of `square`, or `None`.
        - `masks`: the masks of the window.
        - `part`: the part by leaf, if it is not the whole.
        """
        recipe, optimizer, flat, leaves = self.recipe, self.recipe.optimizer, self.flat, self.leaves
        aside = self.aside.unpack(beside)
        examples = aside["sums"]["loss"].count
        now = _at(hyper, state.step)
        norm = square = None
        if squares is not None:  # of chunks, added in tree order: equal on any number of devices
            square = tree_sum([squares[i] for i in range(squares.size)], jnp.add)
            norm = jnp.sqrt(square) / examples if self._clips else None
        gradient = summed / examples
        if leaves is None:
            # The bits do not depend on where a vector is cut: measured on the CPU with AdamW and
            # SGD with Nesterov momentum, cut into 1 to 1,000 pieces of two values or more. Over a
            # tree of leaves they differ in the last place. Inputs and outputs are vectors too:
            # the compiler would fuse the slices of a tree's leaves with the arithmetic. That may
            # change the bits, and the update took 3 to 4 times as long.
            params, moments = optimizer.update(
                gradient.astype(flat.dtype),
                state.optimizer,
                state.params,
                now,
                decaying=masks.get("decaying", self.decays),
                norm=norm,
                members=masks.get("members"),
            )
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
        """Whether all values of the vector decay (true) or none does (false). `None` if only some
        decay."""
        chosen = set(jax.tree.leaves(self.recipe.optimizer.decaying(self._params)))
        return (bool(chosen.pop()) if chosen else True) if len(chosen) < 2 else None

    def masks(self) -> dict[str, tuple[DTypeLike, Tree]]:
        """The properties that differ between values of the vector in an elementwise update:
        `decaying` (whether they decay) and `members` (their group). Each has a dtype, and a value
        for each leaf of the parameters."""
        optimizer = self.recipe.optimizer
        masks: dict[str, tuple[DTypeLike, Tree]] = {}
        if optimizer.elementwise and self.decays is None:
            masks["decaying"] = (np.bool_, optimizer.decaying(self._params))
        if optimizer.patterns:
            masks["members"] = (np.int8, optimizer.members(self._params))
        return masks

    def spread(self, numpy: ModuleType = jnp) -> dict[str, Any]:
        """The `masks` of the whole vector, each `(flat.size,)`, traced or as arrays of `numpy`."""
        return {name: self._spread(numpy, *mask) for name, mask in self.masks().items()}

    def _spread(self, numpy: ModuleType, dtype: DTypeLike, leaves: Tree) -> Any:
        if self.recipe.shards > 1:  # a mask of rows must be the same on every device

            def fits(value: Any, leaf: Any) -> bool:
                shape = np.shape(value)
                return len(shape) in (0, leaf.ndim) and shape[:1] in ((), leaf.shape[:1])

            if not all(jax.tree.leaves(jax.tree.map(fits, leaves, self.flat.tree))):
                patterns = self.recipe.optimizer.patterns
                raise RecipeError(
                    "shards-rows",
                    "A pattern of {patterns:list} selects some rows of a stacked parameter, which "
                    "shards={shards} splits along these rows: name another axis in Task.sharding, "
                    "or leave "
                    "the rows together.",
                    shards=self.recipe.shards,
                    patterns=patterns,
                )
        spread = jax.tree.map(
            lambda value, leaf: numpy.full(leaf.shape, value, dtype), leaves, self.flat.tree
        )
        flat = self.flat.of(spread, dtype)
        return flat.pack(spread, numpy)

    def _averaged(self, ema: Array, params: Array) -> Array:
        """Returns `ema + (1 - decay) * (params - ema)`, so that the average of a constant is
        exactly that constant."""
        step = jnp.asarray(1 - (self.recipe.ema or 0.0), ema.dtype)
        return ema + step * (params - ema)


WORTH_BYTES = 16 << 20
"""The bytes that each device must save for the optimizer's state to be sharded by default. Each
step then starts a few more programs, which slows down small models."""


def shards_optimizer(updates: Update, state: TrainState, devices: int, wanted: bool | None) -> bool:
    """Whether to shard the optimizer's state over `devices`. It is sharded if `wanted`, or by
    default (`None`) if each device saves `WORTH_BYTES`, but only if that changes no bits.

    With an update by leaf, the leaves must be `apart`. Otherwise no leaf may be rounded from the
    vector, and parts must be longer than one value. A compiler joins the update of a single value
    with the arithmetic of scalars.

    *Arguments:* `state` has arrays or shapes.
    """
    if wanted is False or devices == 1 or updates.recipe.shards > 1:
        return False
    size, part = updates.flat.size, updates.windows(devices)[0].part
    if updates.leaves is not None:
        exact = updates.leaves.apart
    else:
        exact = part > 1 and not updates.flat.rounds
    if not exact:
        return False
    return (
        bool(wanted) or nbytes((state.optimizer, state.ema)) * (size - part) // size >= WORTH_BYTES
    )


def _at(hyper: WindowHyper, step: Array) -> dict[str, Array]:
    """The hyperparameters of a step."""
    return {name: table[step - hyper["start"]] for name, table in hyper["tables"].items()}


def _added(old: Tree, new: Tree) -> Tree:
    """The sum of two trees, leaf by leaf, in the structure of `old`. It does not use
    `jax.tree.map`, which sees two structures if the loss creates a new `finish` function in each
    trace."""
    leaves, structure = jax.tree.flatten(old)
    return jax.tree.unflatten(
        structure, [a + b for a, b in zip(leaves, jax.tree.leaves(new), strict=True)]
    )
