"""From the sums over all replicas to the next state. Decay and clipping act here, once.

An elementwise optimizer works on the flat vector of the trained parameters, between two barriers that keep
what stands around it out of its arithmetic: where the vector is cut changes no bit (measured on the CPU with
AdamW and SGD with Nesterov momentum, cut into 1 to 1,000 pieces; over a tree of leaves they differ in the
last place). The norm for clipping is summed chunk by chunk, and the chunks in the tree. Optimizers that look
at whole leaves (LAMB, LARS, Adafactor, Muon, unknown ones) get the tree.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..recipe.recipe import Recipe
from ..recipe.task import Tree
from .flat import Flat
from .layout import tree_sum
from .replica import from_sums, summable
from .state import TrainState, flat_of


class Update:
    """The update of `recipe`'s state. All methods are pure functions of arrays.

    *Arguments:* `state`, as arrays or shapes.

    *Fields:* `flat`: how the parameters lie in the vector that is summed, which begins with their gradient;
    `aside`: how the metric sums and the task's state lie behind it; `size` of that vector; `squares`: their
    shapes, one for each chunk where the norm is clipped, otherwise none.
    """

    def __init__(self, recipe: Recipe, state: TrainState):
        self.recipe = recipe
        self.flat = flat_of(recipe, state.params)
        self._gradient = Flat(state.params, self.flat.chunks)  # as it is summed, float32
        summed = jax.eval_shape(lambda s: summable(s, jnp.int32(0), recipe.replicas), state.state)
        self.aside = Flat({"sums": state.sums, "state": summed})
        self.size = self.flat.size + self.aside.size
        chunks = recipe.replicas if "clip" in recipe.optimizer.hyper else 0
        self.squares = [jax.ShapeDtypeStruct((), jnp.float32)] * chunks

    def vector(self, contribution: dict[str, Any]) -> jax.Array:
        """What a replica contributes, as the vector `(size,)` float32 that is summed."""
        aside = {name: contribution[name] for name in ("sums", "state")}
        return jnp.concatenate([self._gradient.pack(contribution["grads"]), self.aside.pack(aside)])

    def square(self, total: jax.Array, chunk: jax.Array) -> jax.Array:
        """`()` float32: the sum of squares of chunk `chunk` `()` of the gradient in `total` `(size,)`."""
        width = self.flat.chunk
        part = lax.optimization_barrier(lax.dynamic_slice(total, (chunk * width,), (width,)))
        return jnp.sum(part * part)

    def __call__(
        self, state: TrainState, total: jax.Array, hyper: dict, squares: list[jax.Array]
    ) -> tuple[TrainState, jax.Array]:
        """The state after a step, without its frozen part, and a token `()` to wait for.

        *Arguments:* `total` `(size,)`, the sum of all replicas' vectors; `hyper`, the window's tables and its
        first step; `squares`, of each chunk as of `square`, or none where nothing is clipped.
        """
        recipe, optimizer = self.recipe, self.recipe.optimizer
        aside = self.aside.unpack(total[self.flat.size :])
        examples = aside["sums"]["loss"].count
        now = {name: table[state.step - hyper["start"]] for name, table in hyper["tables"].items()}
        norm = jnp.sqrt(tree_sum(squares, jnp.add)) / examples if squares else None
        gradient = total[: self.flat.size] / examples
        if optimizer.elementwise:
            decaying = self._decaying(state.params)
            held = (self.flat.pack(state.params), gradient, state.optimizer, decaying)
            vector, gradient, moments, decaying = lax.optimization_barrier(held)
            moved, moments = optimizer.update(
                gradient.astype(self.flat.dtype), moments, vector, now, decaying=decaying, norm=norm
            )
            moved, moments = lax.optimization_barrier((moved, moments))
            params = self.flat.unpack(moved)
        else:
            params, moments = optimizer.update(
                self._gradient.unpack(gradient), state.optimizer, state.params, now, norm=norm
            )
            moved = None
        done = state.step + jnp.int32(1)
        after = TrainState(
            step=done,
            params=params,
            frozen=None,
            state=from_sums(state.state, aside["state"], recipe.replicas),
            optimizer=moments,
            ema=self._averaged(state.ema, params, moved),
            sums=_added(state.sums, aside["sums"]),
        )
        return after, done

    def _decaying(self, params: Tree) -> Any:
        """Which values of the vector decay: a bool for all of them, or `(flat.size,)`."""
        leaves = self.recipe.optimizer.decaying(params)
        chosen = set(jax.tree.leaves(leaves))
        if len(chosen) < 2:
            return chosen.pop()
        spread = jax.tree.map(lambda does, leaf: jnp.full(leaf.shape, does), leaves, params)
        return Flat(spread, self.flat.chunks, jnp.bool_).pack(spread)

    def _averaged(self, ema: jax.Array | None, params: Tree, moved: jax.Array | None) -> jax.Array | None:
        """`ema + (1 - decay) * (params - ema)`, so that what does not change stays exactly itself."""
        if ema is None:
            return None
        if moved is None or self.flat.rounds:
            moved = self.flat.pack(params)
        ema, moved = lax.optimization_barrier((ema, moved))
        step = jnp.asarray(1 - (self.recipe.ema or 0.0), ema.dtype)
        return ema + step * (moved - ema)


def _added(old: Tree, new: Tree) -> Tree:
    """Leaf by leaf, as `old` is built: a `finish` made inside the loss is a new function in every trace,
    which `jax.tree.map` takes for another structure."""
    leaves, structure = jax.tree.flatten(old)
    return jax.tree.unflatten(structure, [a + b for a, b in zip(leaves, jax.tree.leaves(new), strict=True)])
