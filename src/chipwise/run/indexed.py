"""Refuses values of the data with which a loss would index outside of an array, such as a label 10
among the classes 0 to 9. JAX takes another class for it, or none, and says nothing.

Data is compared on the host when it is read, by the least and the largest value of a column. A
value outside is no error if the loss leaves it out, by an `ignore_index`, a mask or a weight of 0:
this is tried with the first examples that have it. A value that they leave out is not tried again,
and a column is not checked any more once many of its values are left out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from ..base import DataError
from ..data.sources import Columns, check_labels, materialize
from ..data.synthetic import Synthetic
from ..recipe.recipe import Recipe
from ..recipe.schedules import host_device
from ..recipe.source import Source, spec_of
from ..recipe.task import Sum
from ..step.index_ranges import index_ranges, with_outside
from ..step.program_flops import program_flops
from ..step.state import TrainState, abstract_state, nbytes
from .neighbours import MOST_BYTES, MOST_FLOPS

_VALUES = 16  # values outside that are tried of a column
_EXAMPLES, _GROUPS = 64, 8  # examples of each, and at least as many groups of them
_TRIALS = 3  # losses of a group, as a rule


class Indexed:
    """The columns of a source that a loss uses as indices.

    *Arguments:* `traced`: computes the loss, its result `output`. Its last arguments are columns.
    `group`: the examples that it gets.
    """

    def __init__(
        self, recipe: Recipe, source: Source, traced: ClosedJaxpr, group: int, output: int = 0
    ):
        self._classes, self._group = recipe.task.classes, group
        self._tried = max(1, group - 1)  # rows of a group that have a value outside
        self._names = sorted(spec_of(source))  # as JAX sorts a dict
        self._shapes = [v.aval for v in traced.jaxpr.invars[-len(self._names) :]]
        # Random values may be any
        self.ranges = {} if isinstance(source, Synthetic) else index_ranges(traced, self._names)
        self._left_out: dict[str, set[Any]] = {name: set() for name in self.ranges}
        self._loss = jax.jit(
            lambda columns, seeds, tried: with_outside(traced, columns, seeds, tried, output),
            static_argnums=2,
        )

    def read(self, source: Source, data: str) -> Columns:
        """All examples of `source`, column to `(examples, ...)`, after `check`."""
        columns = materialize(source)
        self.check(columns, data)
        return columns

    def check(
        self, columns: Mapping[str, np.ndarray], data: str, indices: np.ndarray | None = None
    ) -> None:
        """Raises `DataError` for a label that is no class, or a value outside on which the loss
        depends. The arguments are those of `check_labels`."""
        check_labels(columns, self._classes, data, indices)
        for name, (least, last) in self.ranges.items():
            column, left_out = columns[name], self._left_out[name]
            if not column.size or (least <= column.min() and column.max() <= last):
                continue
            outside = (column < least) | (column > last)
            outside &= ~np.isin(column, list(left_out))
            while outside.any() and len(left_out) < _VALUES:
                value = column.reshape(-1)[outside.argmax()].item()
                row = self._depending(columns, name, value)
                if row is not None:
                    facts = {"column": name, "value": value, "least": least, "last": last}
                    facts["example"] = row if indices is None else int(indices[row])
                    raise DataError("index-outside", data=data, size=last - least + 1, **facts)
                left_out.add(value)
                outside &= column != value

    def _depending(self, columns: Mapping[str, np.ndarray], name: str, value: Any) -> int | None:
        """The first row with `value` in a column on which the loss depends, of those that are
        tried."""
        rows = np.flatnonzero((columns[name] == value).reshape(len(columns[name]), -1).any(axis=1))
        # What cannot be computed on the host, such as a kernel of another chip, is no error
        with jax.default_device(host_device()), contextlib.suppress(Exception):
            groups = min(max(_GROUPS, math.ceil(_EXAMPLES / self._tried)), self._affordable(name))
            rows = rows[: groups * self._tried]
            for start in range(0, len(rows), self._tried):
                tried = rows[start : start + self._tried]
                if self._depends(columns, name, value, tried):
                    for row in tried:
                        if self._depends(columns, name, value, [row]):
                            return int(row)
        return None

    def _affordable(self, name: str) -> int:
        """The groups for which the host tries a value of a column in a second or so."""
        traced = self._loss.trace(self._shapes, (0, 0, 2), self._names.index(name)).jaxpr
        # Without what the loss does not need, such as drawn parameters
        needed, _ = dce_jaxpr(traced.jaxpr, [True])
        sizes = [nbytes(v.aval) for made in needed.eqns for v in made.outvars]
        if max(sizes, default=0) > MOST_BYTES:
            return 0
        # A byte that is written takes about as long as a FLOP
        return int(MOST_FLOPS["cpu"] / (_TRIALS * max(1.0, program_flops(needed) + sum(sizes))))

    def _depends(self, columns: Mapping[str, np.ndarray], name: str, value: Any, rows: Any) -> bool:
        """Whether the loss of these rows, repeated to a group, depends on `value`."""
        taken = {n: columns[n][np.resize(rows, self._group)] for n in self._names}
        inside = dict(taken)
        for other, limits in self.ranges.items():
            clipped = np.clip(taken[other].astype(np.float64), *limits)
            inside[other] = clipped.astype(taken[other].dtype)
        own = np.where(taken[name] == value, taken[name], inside[name])
        # A mean over the labels that count is NaN without one
        own[self._tried :] = inside[name][self._tried :]
        everywhere = {**inside, name: np.full_like(own, value)}

        def loss(columns: Columns, *seeds: int) -> np.ndarray:
            given = zip(self._names, self._shapes, strict=True)
            ordered = [columns[n].reshape(s.shape) for n, s in given]
            return np.asarray(self._loss(ordered, seeds, self._names.index(name)))

        trials = ((0, 0, 2), (1, 0, 2), (0, 1, 2))
        first, read, compared = (loss({**inside, name: own}, *seeds) for seeds in trials)
        if np.isnan(first).any() and np.isfinite(loss(inside, 0, 0, 2)).all():
            return True
        if not _same(first, read):
            return True
        if _same(first, compared):
            return False
        # A one-hot vector of zeros may be meant, unless the loss then ignores the model's outputs
        ignores, ignores_all = (
            _same(loss(given, 0, 0, 2), loss(given, 0, 0, 3)) for given in (inside, everywhere)
        )
        return ignores_all and not ignores


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one, other, equal_nan=True)


def in_training(recipe: Recipe) -> tuple[TrainState, Indexed]:
    """The training state as shapes and types, and what checks training data. The loss is traced
    once for both."""
    loss: list[ClosedJaxpr] = []
    state = abstract_state(recipe, loss.append)
    return state, Indexed(recipe, recipe.task.train, loss[0], recipe.batch // recipe.replicas)


def in_evaluation(
    recipe: Recipe, source: Source, traced: ClosedJaxpr, sums: Mapping[str, Sum], group: int
) -> Indexed:
    """What checks the data of an evaluation, which computes `sums` (`run.evaluate.Evaluation`)."""
    places = {name: replace(s, total=name == "loss", count=False) for name, s in sums.items()}
    return Indexed(recipe, source, traced, group, jax.tree.leaves(places).index(True))
