"""The update of an optimizer that needs whole leaves, taken apart by leaf, so that devices can share it out.

Its equations show which leaf's gradient and state each new value needs. If no leaf needs another's, each is
updated by its own equations, on whichever device; else, as with a norm of all gradients inside of an optax
chain, the tree stays together. A row of a stacked leaf (`Optimizer.layers`) counts as a leaf.

A compiler fuses what stands side by side, and the bits depend on that. So the equations of each leaf are
compiled as if alone, and so are those of all leaves, such as a count of steps.
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
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from ..models.chip_traits import platform
from ..recipe.optimizers import Optimizer
from ..recipe.task import Tree
from .flat import Flat
from .layout import Ranges, balanced
from .program_digest import digest, vars_of


class OwnLeaves(NamedTuple):
    """What a device updates. *Fields:* `span`: for leaves, by number, the first of its rows and the one after
    the last; `first`: where they begin in the device's vectors; `before` and `after`: how many rows of others
    are beside them in its window of rows."""

    span: dict[int, tuple[int, int]]
    first: int = 0
    before: int = 0
    after: int = 0


class Leaves:
    """The leaves of `flat`, the parameters' vector, and how `optimizer` updates each.

    *Arguments:* `given`: the shapes of its hyperparameters and of the gradient's norm, a pair.

    *Fields:* `apart`: whether leaves can be updated one by one; `owners`: then, for each leaf of the
    optimizer's state, the number of the leaf to which it belongs, or None.
    """

    def __init__(self, optimizer: Optimizer, flat: Flat, given: tuple[Tree, Any]):
        self._flat, self._layers = flat, optimizer.layers(flat.tree)
        leaves, structure = jax.tree.flatten(flat.tree)
        self._shapes = [
            jax.ShapeDtypeStruct((1, *leaf.shape[1:]) if n > 1 else leaf.shape, leaf.dtype)
            for leaf, n in zip(leaves, self._layers, strict=True)
        ]
        self._sizes = [math.prod(shape.shape) for shape in self._shapes]
        self._rows = [(i, row) for i, n in enumerate(self._layers) for row in range(n)]
        decaying, rows = optimizer.decaying(flat.tree), jax.tree.unflatten(structure, self._shapes)

        def together(grads: Tree, params: Tree, moments: Tree, given: tuple[Tree, Any]) -> tuple[Tree, Tree]:
            return optimizer.update(grads, moments, params, given[0], decaying=decaying, norm=given[1])

        self._together = together
        grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), rows)
        made = jax.make_jaxpr(together)(grads, rows, jax.eval_shape(optimizer.init, rows), given)
        self._take_apart(made.jaxpr, made.consts)

    def _take_apart(self, jaxpr: Any, consts: list[Any]) -> None:
        """Sorts the equations by the leaf of which they need something."""
        any_of: Any = functools.partial(functools.reduce, operator.or_)  # sets, as the bits of numbers
        count = len(self._shapes)
        after = jaxpr.outvars[count:]
        moments, given = jaxpr.invars[2 * count :][: len(after)], jaxpr.invars[2 * count + len(after) :]
        found = {variable: 1 << i % count for i, variable in enumerate(jaxpr.invars[: 2 * count])}
        owned: list[int] | None = None
        while owned != (owned := [found.get(variable, 0) for variable in moments]):  # until all are found
            for one in jaxpr.eqns:
                found |= dict.fromkeys(one.outvars, any_of((found.get(v, 0) for v in vars_of(one.invars)), 0))
            for old, new in zip(moments, after, strict=True):
                if not isinstance(new, Literal):
                    found[old] = found.get(old, 0) | found.get(new, 0)
        self.apart = all(leaves.bit_count() < 2 for leaves in found.values())
        self.owners = [leaves.bit_length() - 1 if leaves and self.apart else None for leaves in owned]
        if not self.apart:
            return

        free = [k for k, owner in enumerate(self.owners) if owner is None]
        users = {after[k]: -1 for k in free if not isinstance(after[k], Literal)}
        equations = dict[int, list[Any]]()
        for one in reversed(jaxpr.eqns):  # what only one leaf uses is the leaf's, whatever it needs
            leaves = found[one.outvars[0]] or any_of(users.get(v, 0) for v in one.outvars)
            leaves = 0 if leaves & (leaves - 1) else leaves
            equations.setdefault(leaves, []).append(one)
            users |= {v: users.get(v, 0) | (leaves or -1) for v in vars_of(one.invars)}

        def part(leaves: int, variables: list[Any], results: list[Any]) -> ClosedJaxpr:
            own = equations.get(leaves, [])[::-1]
            return ClosedJaxpr(jaxpr.replace(eqns=own, constvars=[], invars=variables, outvars=results), ())

        made = {v for leaves, own in equations.items() if leaves for one in own for v in one.outvars}
        used = (v for leaves, own in equations.items() if leaves for one in own for v in vars_of(one.invars))
        common = list(dict.fromkeys(v for v in used if v not in made and not found.get(v, 0)))
        known = [*jaxpr.constvars, *(moments[k] for k in free), *given]
        self._consts, self._common = consts, (part(0, known, [*common, *(after[k] for k in free)]), free)
        self._moving, kinds = list[tuple[Any, list[int]]](), dict[Any, Any]()
        for i in range(count):
            own = [k for k, owner in enumerate(self.owners) if owner == i]
            known = [jaxpr.invars[i], jaxpr.invars[count + i], *(moments[k] for k in own), *common]
            one = part(1 << i, known, [jaxpr.outvars[i], *(after[k] for k in own)])
            kind = digest([one]), self._layers[i] > 1
            self._moving.append((kinds.setdefault(kind, _over_rows(one, self._layers[i] > 1)), own))

    def windows(self, groups: int) -> tuple[Ranges, Ranges]:
        """The parts of `groups` groups, of the vector and of all rows."""
        sizes = [self._sizes[i] for i, _ in self._rows]
        rows, firsts = balanced(sizes, groups), [0, *itertools.accumulate(sizes)]
        return Ranges((*(firsts[row] for row in rows[:-1]), self._flat.size)), Ranges(rows)

    def part(self, group: int, groups: int) -> OwnLeaves:
        """That of one of `groups` groups."""
        values, rows = self.windows(groups)
        span = dict[int, tuple[int, int]]()
        for i, row in self._rows[slice(*rows.bounds[group : group + 2])]:
            span[i] = (span.get(i, (row,))[0], row + 1)
        before, after = rows.own(group)
        return OwnLeaves(span, values.own(group)[0], before, rows.part - after)

    def rows(self, moments: Tree, back: bool = False) -> Tree:
        """The optimizer's whole state with an axis of rows in each leaf that has an owner; or `back`."""
        leaves, structure = jax.tree.flatten(moments)
        for k, owner in enumerate(self.owners):
            if owner is not None and self._layers[owner] == 1:
                leaves[k] = leaves[k][0] if back else leaves[k][None]
        return jax.tree.unflatten(structure, leaves)

    def squares(self, vector: jax.Array, part: OwnLeaves | None = None) -> jax.Array:
        """The sum of squares of each row, from a vector of values; 0 for those of others in the window."""

        def square(row: jax.Array) -> jax.Array:  # if the first value is not a number, neither is the sum
            part = jax.make_jaxpr(lambda x: jnp.sum(x * x))(row)
            return _alone(part, ~jnp.isnan(row.reshape(-1)[:1]).any(), row)[0]

        part = part or self._all
        sums = [lax.map(square, rows) for _, (rows,) in self._each(part, vector)]
        return jnp.concatenate([jnp.zeros(part.before), *sums, jnp.zeros(part.after)])

    @property
    def _all(self) -> OwnLeaves:
        return OwnLeaves({i: (0, n) for i, n in enumerate(self._layers)})

    def _each(self, part: OwnLeaves, *vectors: jax.Array) -> Iterator[tuple[int, list[jax.Array]]]:
        """The leaves of a part, and their rows in each of `vectors` as the equations need them."""
        at = part.first
        for i, (first, after) in part.span.items():
            end = at + (after - first) * self._sizes[i]
            yield i, [x[at:end].reshape(after - first, *self._shapes[i].shape) for x in vectors]
            at = end

    def update(
        self, grads: jax.Array, moments: Tree, params: jax.Array, given: Any, step: jax.Array,
        part: OwnLeaves | None = None,
    ) -> tuple[jax.Array, Tree]:  # fmt: skip
        """New parameters and optimizer's state.

        *Arguments:* vectors `grads` and `params`; `moments`; `given`: hyperparameters and norm; `step` `()`;
        `part`, if all are of a device's part, its state with `rows`.
        """
        flat = self._flat
        if not self.apart:
            tree = flat.widened(jnp.float32).unpack(grads), flat.unpack(params)
            moved, moments = self._together(*tree, moments, given)
            return flat.pack(moved), moments
        values, structure = jax.tree.flatten(self.rows(moments) if part is None else moments)
        (common, free), sure = self._common, step >= 0
        made = _alone(common, sure, *self._consts, *(values[k] for k in free), *jax.tree.leaves(given))
        shared, after = made[: len(made) - len(free)], made[len(made) - len(free) :]
        news = dict(zip(free, after, strict=True))
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
    """The function of rows: their gradients, parameters and state; of `sure`, and what all leaves share."""

    @jax.jit  # so that leaves of one kind are traced once
    def moved(rows: list[Any], sure: jax.Array, shared: list[Any]) -> list[Any]:
        def turn(row: list[Any]) -> list[Any]:
            state = [x[None] for x in row[2:]] if stacked else row[2:]
            new, *state = _alone(part, sure, *row[:2], *state, *shared)
            return [new, *(x[0] for x in state)] if stacked else [new, *state]

        return lax.map(turn, rows)

    return moved


def _alone(part: ClosedJaxpr, sure: jax.Array, *given: Any) -> Any:
    """What `part` makes of `given`, compiled alike whatever stands beside it. *Arguments:* `sure` `()`: true,
    or what is returned is not a number."""
    function = jaxpr_as_fun(part)
    if platform() != "cpu":
        return lax.optimization_barrier(function(*lax.optimization_barrier(given)))

    # XLA for CPUs drops barriers before it fuses, but compiles a branch by itself; and it does not know that
    # this one is always taken.
    def never(*_: Any) -> Any:
        results = [variable.aval for variable in part.jaxpr.outvars]
        floating = [jnp.issubdtype(x.dtype, jnp.inexact) for x in results]
        return [
            jnp.full(x.shape, jnp.nan if f else 0, x.dtype) for x, f in zip(results, floating, strict=True)
        ]

    return lax.cond(sure, function, never, *given)
