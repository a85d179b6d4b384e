"""Joins the head of pretrained weights to the classes of a task by name.

A head has a slice of each of its arrays for each class. `dog` may be slice 1 in the file and class
0 of the task, and both have equal shapes. So slices are taken by the names of classes that the
weights and the task state. Where one of the two states none, their numbers stay, and a run says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import DataError, Fact, RecipeError, fact
from ..data.class_names import names_in, nfc, numbers_of
from ..recipe.random_keys import as_keys
from ..recipe.source import Columns, rows_of, spec_of
from ..recipe.task import Task
from ..recipe.user_code import user_code
from ..run.folder.checkpoint import flatten
from .weight_names import NamedArrays, abstract_arrays, model_tree

_EQUAL = 1e-3  # of what another order changes: products of other shapes are rounded otherwise

Rows = Mapping[str, tuple[int, np.ndarray]]
"""The name of an array to the axis of its classes, and the number in the file of each class of the
task, `(classes,)`."""


def joined_head(
    path: str, theirs: tuple[str, ...], task: Task, used: NamedArrays
) -> tuple[Rows, Fact | None]:
    """The slices to take of the arrays of a head, and the fact that a run reports at its start.

    *Arguments:* `theirs`: the names of the classes of the weights at `path`, or `()`. `used`: the
    arrays of the weights by their names in the task.

    Raises `RecipeError` for classes that the weights lack, and for classes in another order if it
    is not known which arrays have them.
    """
    ours = [names for names in (names_in(task), task.class_names) if names]
    if theirs in ours or not (theirs or ours) or not (count := _classes(task)):
        return {}, None
    theirs = theirs if len(theirs) == count else ()
    ours = [names for names in ours if len(names) == count]
    # Without `predict` vectors and matrices of that size
    wide = [name for name, a in used.items() if count in a.shape and a.ndim < 3]
    if not (theirs or ours) or not wide:
        return {}, None
    both = bool(theirs and ours)
    head = _head(task, used, count) if both or _is_new(task, used, count) else {}
    filled = [name for name in head or wide if name in used]
    if not filled:
        return {}, None
    if not both:
        names = theirs or ours[0]
        numbers = [f"{name}={i}" for i, name in enumerate(names)]
        side = "the model" if theirs else path
        return {}, fact("head-by-number", path=path, side=side, numbers=numbers)
    own = next((one for one in ours if {*map(nfc, one)} <= {*map(nfc, theirs)}), ours[0])
    fresh = tuple(name.partition(".")[2].replace(".", "/") for name in filled)
    facts: dict[str, Any] = {"path": path, "theirs": theirs, "fresh": fresh}
    try:
        order = numbers_of(theirs, own, path)
    except DataError as error:
        wrong = error.facts["classes"]
        raise RecipeError("head-of-other-classes", classes=wrong, **facts) from error
    if not head:
        raise RecipeError("head-in-another-order", classes=own, **facts)
    joining = fact("head-joined", path=path, classes=own)
    return {name: (head[name], order) for name in filled}, joining


def _inputs(task: Task) -> Columns:
    """Two made-up examples of what `predict` takes."""
    rng = np.random.default_rng(0)
    spec = {name: s for name, s in spec_of(task.train).items() if name != "label"}
    return {
        name: rng.uniform(0, 100 if s.dtype == np.uint8 else 2, s.shape).astype(s.dtype)
        for name, s in rows_of(spec, 2).items()
    }


def _classes(task: Task) -> int | None:
    """The number of classes: `Task.classes`, or that of the outputs. `None` for other outputs."""
    if task.predict is None:
        return task.classes
    first = jax.eval_shape(task.init, jax.eval_shape(lambda: jax.random.key(0)))
    columns = _inputs(task)
    with user_code("Task.predict", columns):
        made = jax.eval_shape(task.predict, *first, columns)
    shape: tuple[int, ...] = getattr(made, "shape", ())
    return shape[1] if len(shape) == 2 else None


def _is_new(task: Task, used: NamedArrays, count: int) -> bool:
    """Whether an array that may be a head's is none of `used`. Computes shapes alone."""
    shapes = abstract_arrays(task)
    return any(count in a.shape and name not in used for name, a in shapes.items())


def _head(task: Task, used: NamedArrays, count: int) -> dict[str, int]:
    """The arrays of the head, name to the axis of its classes: those of one layer whose slices, in
    another order, give the same outputs in that order. `{}` if no such layer is found."""
    predict = task.predict
    if predict is None:
        return {}
    tree = model_tree(*task.init(jax.random.key(0)))
    whole = {n: np.asarray(used.get(n, a), a.dtype) for n, a in flatten(tree).items()}
    rng = np.random.default_rng(0)
    # A head may begin at zero, where its order would not show
    values = {
        n: a + 0.01 * rng.normal(size=a.shape).astype(a.dtype) if a.dtype.kind == "f" else a
        for n, a in whole.items()
    }
    columns = jax.tree.map(jnp.asarray, _inputs(task))

    @jax.jit
    def run(leaves: list[jax.Array]) -> jax.Array:
        given = as_keys(jax.tree.unflatten(jax.tree.structure(tree), leaves))
        return predict(given["params"], given["state"], columns)

    def outputs(axes: Mapping[str, int]) -> np.ndarray:
        return np.asarray(
            run([np.roll(a, 1, axes[n]) if n in axes else a for n, a in values.items()]), np.float64
        )

    expected = np.roll(before := outputs({}), 1, axis=1)
    apart = np.abs(expected - before).max()
    layers: dict[str, list[tuple[str, int]]] = {}
    for name, a in values.items():
        places = [(name, axis) for axis, size in enumerate(a.shape) if size == count]
        layers.setdefault(name.rpartition(".")[0], []).extend(places[::-1])
    for places in layers.values():
        for some in (1, 2):  # a matrix, and what is added to its product
            for chosen in itertools.combinations(places, some):
                axes = dict(chosen)
                if len(axes) == some and (np.abs(outputs(axes) - expected).max() < _EQUAL * apart):
                    return axes
    return {}
