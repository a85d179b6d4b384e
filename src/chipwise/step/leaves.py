"""Splits the update of an optimizer that needs whole leaves by leaf, so that devices can share it.

The update's equations show which leaf's gradient and state each new value needs. If no leaf needs
those of another, each leaf is updated by its own equations, on any device. Otherwise, as with a
norm of all gradients inside of an optax chain, the tree stays together. A row of a stacked leaf
(`Optimizer.layers`) counts as a leaf.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from ..models.chip_traits import platform
from ..recipe.optimizers import Optimizer
from ..recipe.task import Tree
from .flat import Flat
from .inline import Atom, inlined
from .layout import Ranges, balanced
from .program_digest import digest, vars_of

Extra = tuple[dict[str, Array], Array | None]
"""The hyperparameters of a step, and the gradient's norm if the optimizer clips it."""


class OwnLeaves(NamedTuple):
    """The leaves and rows that a device updates."""

    span: dict[int, tuple[int, int]]
    """For each leaf, by number, the first of the device's rows and the one after its last."""
    first: int = 0
    """The position in the device's vectors at which its values begin."""
    before: int = 0
    """The number of rows of other devices before its own in the device's window of rows."""
    after: int = 0
    """The number of rows of other devices after its own in the device's window of rows."""


class Leaves:
    """The leaves of `flat`, the parameters' vector, and the update of each by `optimizer`.

    *Arguments:* `extra` has shapes in place of arrays.

    *Fields:* `apart` says whether leaves can be updated one by one. `owners` has, for each leaf of
    the optimizer's state, the number of the leaf to which it belongs. It is `None` for a leaf that
    belongs to no leaf, and for all leaves if they are not `apart`.
    """

    def __init__(self, optimizer: Optimizer, flat: Flat, extra: Extra):
        self._flat, self._layers = flat, optimizer.layers(flat.tree)
        leaves, structure = jax.tree.flatten(flat.tree)
        self._shapes = [
            jax.ShapeDtypeStruct((1, *leaf.shape[1:]) if n > 1 else leaf.shape, leaf.dtype)
            for leaf, n in zip(leaves, self._layers, strict=True)
        ]
        self._sizes = [math.prod(shape.shape) for shape in self._shapes]
        self._rows = [(i, row) for i, n in enumerate(self._layers) for row in range(n)]
        decaying, rows = optimizer.decaying(flat.tree), jax.tree.unflatten(structure, self._shapes)

        def together(grads: Tree, params: Tree, moments: Tree, extra: Extra) -> tuple[Tree, Tree]:
            return optimizer.update(
                grads, moments, params, extra[0], decaying=decaying, norm=extra[1]
            )

        self._together = together
        grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), rows)
        closed = jax.make_jaxpr(together)(grads, rows, jax.eval_shape(optimizer.init, rows), extra)
        self._take_apart(inlined(closed.jaxpr), closed.consts)

    def _take_apart(self, jaxpr: Jaxpr, consts: list[Any]) -> None:
        """Sorts the equations by the leaf whose values they need."""
        any_of: Any = functools.partial(functools.reduce, operator.or_)
        count = len(self._shapes)
        after = jaxpr.outvars[count:]
        moments, extra = (
            jaxpr.invars[2 * count :][: len(after)],
            jaxpr.invars[2 * count + len(after) :],
        )
        # The leaves that each variable needs. A set of leaves is a number with one bit for each.
        needed = {variable: 1 << i % count for i, variable in enumerate(jaxpr.invars[: 2 * count])}
        owned: list[int] | None = None
        # Repeats until nothing changes
        while owned != (owned := [needed.get(variable, 0) for variable in moments]):
            for one in jaxpr.eqns:
                needed |= dict.fromkeys(
                    one.outvars, any_of((needed.get(v, 0) for v in vars_of(one.invars)), 0)
                )
            for old, new in zip(moments, after, strict=True):
                if not isinstance(new, Literal):
                    needed[old] = needed.get(old, 0) | needed.get(new, 0)
        self.apart = all(leaves.bit_count() < 2 for leaves in needed.values())
        self.owners = [
            leaves.bit_length() - 1 if leaves and self.apart else None for leaves in owned
        ]
        if not self.apart:
            return

        free = [k for k, owner in enumerate(self.owners) if owner is None]
        users = {after[k]: -1 for k in free if not isinstance(after[k], Literal)}
        equations = dict[int, list[JaxprEqn]]()
        for one in reversed(jaxpr.eqns):  # an equation that only one leaf uses belongs to that leaf
            leaves = needed[one.outvars[0]] or any_of(users.get(v, 0) for v in one.outvars)
            leaves = 0 if leaves & (leaves - 1) else leaves
            equations.setdefault(leaves, []).append(one)
            users |= {v: users.get(v, 0) | (leaves or -1) for v in vars_of(one.invars)}

        def part(leaves: int, variables: list[Var], results: list[Atom]) -> ClosedJaxpr:
            own = equations.get(leaves, [])[::-1]
            return ClosedJaxpr(
                jaxpr.replace(eqns=own, constvars=[], invars=variables, outvars=results), ()
            )

        alone = [one for leaves, own in equations.items() if leaves for one in own]
        computed = {v for one in alone for v in one.outvars}
        used = (v for one in alone for v in vars_of(one.invars))
        common = list(dict.fromkeys(v for v in used if v not in computed and not needed.get(v, 0)))
        inputs = [*jaxpr.constvars, *(moments[k] for k in free), *extra]
        self._consts = consts
        self._common = part(0, inputs, [*common, *(after[k] for k in free)]), free
        self._moving, kinds = list[tuple[Any, list[int]]](), dict[Any, Any]()
        for i in range(count):
            own = [k for k, owner in enumerate(self.owners) if owner == i]
            inputs = [jaxpr.invars[i], jaxpr.invars[count + i], *(moments[k] for k in own), *common]
            moving = part(1 << i, inputs, [jaxpr.outvars[i], *(after[k] for k in own)])
            stacked = self._layers[i] > 1
            kind = digest([moving]), stacked
            self._moving.append((kinds.setdefault(kind, _over_rows(moving, stacked)), own))

    def windows(self, groups: int) -> tuple[Ranges, Ranges]:
        """The parts of the vector, and of all rows, that `groups` groups update."""
        sizes = [self._sizes[i] for i, _ in self._rows]
        rows, firsts = balanced(sizes, groups), [0, *itertools.accumulate(sizes)]
        return Ranges((*(firsts[row] for row in rows[:-1]), self._flat.size)), Ranges(rows)

    def part(self, group: int, groups: int) -> OwnLeaves:
        """The leaves and rows of one of `groups` groups."""
        values, rows = self.windows(groups)
        span = dict[int, tuple[int, int]]()
        for i, row in self._rows[slice(*rows.bounds[group : group + 2])]:
            span[i] = (span.get(i, (row,))[0], row + 1)
        before, after = rows.own(group)
        return OwnLeaves(span, values.own(group)[0], before, rows.part - after)

    def rows(self, moments: Tree, back: bool = False) -> Tree:
        """Returns the optimizer's whole state with an axis of rows in each leaf that has an owner.
        With `back`, removes that axis again."""
        leaves, structure = jax.tree.flatten(moments)
        for k, owner in enumerate(self.owners):
            if owner is not None and self._layers[owner] == 1:
                leaves[k] = leaves[k][0] if back else leaves[k][None]
        return jax.tree.unflatten(structure, leaves)

    def squares(self, vector: Array, part: OwnLeaves | None = None) -> Array:
        """The sum of squares of each row, from a vector of values. Rows of other devices in the
        window have 0."""

        # If the first value is not a number, neither is the sum
        def square(row: Array) -> Array:
            part = jax.make_jaxpr(lambda x: jnp.sum(x * x))(row)
            return _alone(part, ~jnp.isnan(row.reshape(-1)[:1]).any(), row)[0]

        part = part or self._all
        sums = [lax.map(square, rows) for _, (rows,) in self._each(part, vector)]
        return jnp.concatenate([jnp.zeros(part.before), *sums, jnp.zeros(part.after)])

    @property
    def _all(self) -> OwnLeaves:
        return OwnLeaves({i: (0, n) for i, n in enumerate(self._layers)})

    def _each(self, part: OwnLeaves, *vectors: Array) -> Iterator[tuple[int, list[Array]]]:
        """Yields the leaves of a part, and their rows in each of `vectors` in the shape that the
        equations need."""
        at = part.first
        for i, (first, after) in part.span.items():
            end = at + (after - first) * self._sizes[i]
            yield i, [x[at:end].reshape(after - first, *self._shapes[i].shape) for x in vectors]
            at = end

    def update(
        self,
        grads: Array,
        moments: Tree,
        params: Array,
        extra: Extra,
        step: Array,
        part: OwnLeaves | None = None,
    ) -> tuple[Array, Tree]:
        """Returns the new parameters and the new state of the optimizer.

        *Arguments:* `grads` and `params` are vectors. `moments` is the optimizer's state. `step`
        is `()`. With `part`, all of these are those of a device's part, and `moments` has an axis
        of rows (see `rows`).
        """
        flat = self._flat
        if not self.apart:
            tree = flat.widened(jnp.float32).unpack(grads), flat.unpack(params)
            moved, moments = self._together(*tree, moments, extra)
            return flat.pack(moved), moments
        values, structure = jax.tree.flatten(self.rows(moments) if part is None else moments)
        (common, free), sure = self._common, step >= 0
        # The equations that all leaves share, such as a count of steps
        results = _alone(
            common, sure, *self._consts, *(values[k] for k in free), *jax.tree.leaves(extra)
        )
        shared = results[: len(results) - len(free)]
        news = dict(zip(free, results[len(shared) :], strict=True))
        own, vectors = part or self._all, []
        for i, (slopes, old) in self._each(own, grads, params):
            moving, numbers = self._moving[i]
            rows = [slopes, old.astype(self._shapes[i].dtype), *(values[k] for k in numbers)]
            moved, *state = moving(rows, sure, shared)
            vectors.append(moved.astype(flat.dtype).reshape(-1))
            news |= dict(zip(numbers, state, strict=True))
        end = own.first + sum(vector.size for vector in vectors)
        params = jnp.concatenate([params[: own.first], *vectors, params[end:]])
        moments = jax.tree.unflatten(structure, [news.get(k, x) for k, x in enumerate(values)])
        return params, self.rows(moments, back=True) if part is None else moments


def _over_rows(part: ClosedJaxpr, stacked: bool) -> Any:
    """Returns the function that updates rows. Its arguments are `rows` (their gradients, parameters
    and state), `sure`, and the values that all leaves share."""

    @jax.jit  # so that leaves of one kind are traced once
    def moved(rows: list[Any], sure: Array, shared: list[Any]) -> list[Any]:
        def turn(row: list[Any]) -> list[Any]:
            state = [x[None] for x in row[2:]] if stacked else row[2:]
            new, *state = _alone(part, sure, *row[:2], *state, *shared)
            return [new, *(x[0] for x in state)] if stacked else [new, *state]

        return lax.map(turn, rows)

    return moved


def _alone(part: ClosedJaxpr, sure: Array, *given: Any) -> Any:
    """Evaluates `part` at `given`. Its compiled code does not depend on its neighbours, with which
    a compiler would fuse it, and on which the bits would depend.

    *Arguments:* `sure` `()` is true. Otherwise the result may be NaN in floating arrays and 0 in
    others."""
    function = jaxpr_as_fun(part)
    if platform() != "cpu":
        return lax.optimization_barrier(function(*lax.optimization_barrier(given)))

    # XLA for CPUs drops barriers before it fuses, but compiles a branch by itself. It does not know
    # that this branch is always taken.
    def never(*_: Any) -> Any:
        results = [variable.aval for variable in part.jaxpr.outvars]
        floating = [jnp.issubdtype(x.dtype, jnp.inexact) for x in results]
        return [
            jnp.full(x.shape, jnp.nan if f else 0, x.dtype)
            for x, f in zip(results, floating, strict=True)
        ]

    return lax.cond(sure, function, never, *given)
