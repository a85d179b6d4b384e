"""Train an Equinox module: `cw.equinox.task(make, loss, train=data)`, where `make(key)` constructs
it.

    loss = cw.losses.softmax_cross_entropy
    task = cw.equinox.task(lambda key: Net(key), loss, train=train, eval=test)
    result = cw.fit(cw.Recipe(task=task, ...))
    model = result.to_equinox(lambda key: Net(key))

The module is called with one example, as usual in Equinox, and mapped over the batch with the axis
name "batch" that `eqx.nn.BatchNorm` needs. `state` and `key` are passed if its signature has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..base import library
from ..base.annotations import as_annotated
from ..recipe import freezing
from ..recipe.task import Task, Tree
from . import adapter
from .adapter import Data, Judging, Source, own_promotion, stated, with_loss
from .modes import Mode, check_alike, in_mode, modes_of, parameters, read_modes

INSTALL = "pip install 'chipwise[equinox]'"
AXIS = "batch"
_EXPECTED = "an eqx.Module or a function of a key that makes one: lambda key: Net(key)"
_PAIRS = {
    f"{kind}_state_index/{i}": name
    for kind in ("ema", "batch")
    for i, name in enumerate(("mean", "var"))
}
"""Equinox keeps the statistics of batch norm as a pair. Here they are named "mean" and "var"."""


@as_annotated
def task(
    model: Any,
    loss: Judging,
    *,
    mode: Mode | None = None,
    train: Source,
    eval: Source | None = None,
    inputs: Any = None,
    target: Any = "label",
    metrics: Mapping[str, Callable] | None = None,
    augment: Callable | None = None,
    mix: Callable | None = None,
    classes: int | None = None,
    better: Mapping[str, str] = {},
    eval_group: int = 1,
) -> Task:
    """Makes a `Task` of an Equinox module and a loss.

    *Arguments:*

    - `model`: a function of a key that makes the module (`eqx.nn.make_with_state` is applied here),
      or a module, or the pair of a module and its `eqx.nn.State`. A module's weights are the
      initial values for every seed.
    - `loss`: `(outputs, target)` on the whole batch. It returns values `(batch,)`, their mean, or a
      `Sum`.
    - `mode`: as in `cw.linen.task`, for arguments of the module's `__call__`. The fields called
      `inference` are set too.
    - The others: as in `interop.adapter.Data`. The module's arguments have no batch axis.

    The floating-point arrays of the module are the parameters, named by their paths. Other arrays
    are constants. Raises `RecipeError` if Equinox is missing, if `model` is not a module, and as
    `cw.linen.task` does for an argument that nothing sets.
    """
    eqx = _equinox()
    make = _maker(eqx, model)
    with own_promotion():
        abstract, _ = eqx.filter_eval_shape(make, jax.random.key(0))
    if not isinstance(abstract, eqx.Module):
        raise adapter.not_a_model(
            "equinox", f"a function that returns a {type(abstract).__name__}", _EXPECTED
        )
    kind, signature = type(abstract).__name__, parameters(type(abstract))
    is_state = "state" in signature
    check_alike(kind, _inference(abstract))
    known = parameters(type(abstract), "state", "key")
    modes = modes_of(kind, known, mode)

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        with own_promotion():
            module, state = make(key)
        return _params(eqx, module), _state(state)

    def forward(params, state, given, key, train):
        # For structure and constants; the compiler drops the rest.
        module, fresh = make(jax.random.key(0))
        module = eqx.nn.inference_mode(_with_params(eqx, module, params), value=not train)
        module = _holding(eqx, module) if train else module
        held = _with_state(fresh, state)
        flags, given = in_mode(modes, given, train)
        several = key is not None  # a prediction, of a batch of any size, draws nothing
        keys = jax.random.split(key, adapter.examples(given)) if several else jax.random.key(0)

        def one(given, key):
            more = {**flags, "key": key} if "key" in signature else flags
            if is_state:
                return module(*given.args, **given.kwargs, state=held, **more)
            return module(*given.args, **given.kwargs, **more), held

        axes = (0, 0 if several else None)
        outputs, held = jax.vmap(one, axes, out_axes=(0, None), axis_name=AXIS)(given, keys)
        return outputs, _state(held), None

    columns = Data(train, eval, inputs, target, metrics, augment, mix, classes, better, eval_group)
    built = columns.task("equinox", kind, init, with_loss(forward, loss, kind))
    read = read_modes(kind, built, known, modes, columns, forward, mode is not None)
    return stated(built, kind, loss, read)


@as_annotated
def to_model(model: Any, params: Tree, state: Tree) -> Any:
    """The module with trained weights, and its state if it has any: `module` or `(module, state)`.

    *Arguments:* `model`: as for `task`. Raises `RecipeError` if the weights do not fit the module.
    """
    eqx = _equinox()
    module, fresh = _maker(eqx, model)(jax.random.key(0))
    for kind, own, given in (
        ("parameters", _params(eqx, module), params),
        ("state", _state(fresh), state),
    ):
        adapter.fitting(
            given, "/", {n: x.shape for n, x in adapter.flattened(own, "/").items()}, kind
        )
    module = _with_params(eqx, module, params)
    return (module, _with_state(fresh, state)) if state else module


def _equinox() -> Any:
    return library("equinox", "adapter-library", command=INSTALL)


def _maker(eqx: Any, model: Any) -> Callable:
    """`(key) -> (module, state)`."""
    if isinstance(model, tuple) and len(model) == 2:
        return lambda key: model
    if isinstance(model, eqx.Module):
        return lambda key: eqx.nn.make_with_state(lambda: model)()
    if not callable(model):
        raise adapter.not_a_model("equinox", repr(model), _EXPECTED)
    return eqx.nn.make_with_state(model)


def _names(tree: Any) -> tuple[list[str], list[Any], Any]:
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    return names, [leaf for _, leaf in paths], structure


def _params(eqx: Any, module: Any) -> Tree:
    names, leaves, _ = _names(eqx.filter(module, eqx.is_inexact_array))
    return adapter.nested(dict(zip(names, leaves, strict=True)), "/")


def _with_params(eqx: Any, module: Any, params: Tree) -> Any:
    own, fixed = eqx.partition(module, eqx.is_inexact_array)
    names, _, structure = _names(own)
    flat = adapter.flattened(params, "/")
    return eqx.combine(jax.tree.unflatten(structure, [flat[name] for name in names]), fixed)


def _inference(module: Any) -> dict[str, bool]:
    """The layers that have a field `inference`, to whether it is False."""

    def is_layer(part: Any) -> bool:
        return part is not module and isinstance(getattr(part, "inference", None), bool)

    parts = jax.tree_util.tree_leaves_with_path(module, is_leaf=is_layer)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): not part.inference
        for path, part in parts
        if is_layer(part)
    }


def _holding(eqx: Any, module: Any) -> Any:
    """Puts batch norm with frozen statistics in evaluation mode."""

    def is_norm(part: Any) -> bool:
        return isinstance(part, eqx.nn.BatchNorm)

    def one(path: Any, part: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if is_norm(part) and freezing.holds([f"{name}/mean"]):
            return eqx.tree_at(lambda norm: norm.inference, part, True)
        return part

    return jax.tree_util.tree_map_with_path(one, module, is_leaf=is_norm)


def _state_names(state: Any) -> list[str]:
    """A name for each leaf, such as `Net.norm.batch_counter`, from its path in
    `make_with_state`."""
    values, places = state.tree_flatten()
    names = []
    for place, value in zip(places, values, strict=True):
        path = re.sub(r"[.\[\]']+", "/", str(place).partition(".")[2]).strip("/")
        for inner in _names(value)[0]:
            full = f"{path}/{inner}".rstrip("/")
            head, _, tail = full.rpartition("/")
            above, _, last = head.rpartition("/")
            short = _PAIRS.get(f"{last}/{tail}")
            names.append(f"{above}/{short}".lstrip("/") if short else full)
    return names


def _state(state: Any) -> Tree:
    return adapter.nested(dict(zip(_state_names(state), jax.tree.leaves(state), strict=True)), "/")


def _with_state(fresh: Any, state: Tree) -> Any:
    flat = adapter.flattened(state, "/")
    return jax.tree.unflatten(
        jax.tree.structure(fresh), [flat[name] for name in _state_names(fresh)]
    )
