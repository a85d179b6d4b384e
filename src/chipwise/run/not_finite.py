"""Why a loss is not finite: a value in the data, a label, or an operation of the first step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from ..base import Fact, fact
from ..data.sources import example_bytes, first_outside, spec_of
from ..recipe.random_keys import as_keys
from ..recipe.recipe import Recipe
from ..recipe.user_code import own_line
from ..step import keys
from ..step.state import abstract_model, from_data, nbytes, replaced
from .feed import trained

_EXAMPLES, _AT_ONCE = 20_000, 64  # examples whose values are looked at, and those of the first step
_READ_BYTES = 1 << 28  # of these examples, at most
_MOST_BYTES = 1 << 30  # of parameters that fit beside those of the run
_OPERATIONS = {
    "log": "a log of 0 or less",
    "div": "a division by 0",
    "sqrt": "a root of less than 0",
    "rsqrt": "1 over a root of 0 or less",
    "exp": "an exp of a large number",
}
_IGNORED = -100  # the label that PyTorch's losses leave out


def cause(recipe: Recipe, first: int, last: int) -> Fact | None:
    """Returns why the loss of the steps `first` to `last`, counted from 1, became NaN or infinite,
    if the learning rate is not the reason: `cause-input`, `cause-label` or `cause-operation`."""
    task = recipe.task
    if jax.process_count() > 1:  # each host has read its part alone
        return None
    most = max(1, _READ_BYTES // example_bytes(spec_of(task.train)))
    count = min((last - first + 1) * recipe.batch, most, _EXAMPLES)
    indices, rows = trained(recipe, first - 1, count)
    for name, column in rows.items():
        if jnp.issubdtype(column.dtype, jnp.floating):
            bad = ~np.isfinite(column.astype(np.float32)).reshape(len(column), -1)
            if (wrong := bad.any(axis=1)).any():
                at = int(wrong.argmax())
                value = str(column[at].reshape(-1)[bad[at]][0])
                facts = {
                    "example": int(indices[at]),
                    "count": int(wrong.sum()),
                    "examples": len(column),
                }
                return fact("cause-input", column=name, value=value, **facts)
    params, state = jax.eval_shape(as_keys, abstract_model(recipe))
    some = {name: column[:_AT_ONCE] for name, column in rows.items()}
    label = rows.get("label")
    if (
        task.predict is not None
        and label is not None
        and label.ndim == 1
        and label.dtype.kind in "iu"
    ):
        inputs = {name: column for name, column in some.items() if name != "label"}
        outputs = jax.tree.leaves(jax.eval_shape(task.predict, params, state, inputs))
        if len(outputs) == 1 and len(outputs[0].shape) == 2 and outputs[0].shape[1] > 1:
            classes = outputs[0].shape[1]
            counted = np.where(label == _IGNORED, 0, label.astype(np.int64))
            if (outside := first_outside(counted, classes, indices)) is not None:
                return fact("cause-label", example=outside[0], label=outside[1], last=classes - 1)
    if first > 1 or recipe.shards > 1 or nbytes(params) > _MOST_BYTES:
        return None
    params, state = jax.jit(task.init)(keys.init_key(recipe.seed))
    params, batch = replaced(params, from_data(task)), {n: jnp.asarray(c) for n, c in some.items()}

    def total(params: Any, state: Any, batch: Any) -> Any:
        return task.loss(params, state, batch, jax.random.key(0), True)[0]["loss"].total

    traced = jax.make_jaxpr(total)(params, state, batch)
    made: dict[int, tuple[Any, list[Any], list[Any]]] = {}
    (value,) = _run(traced.jaxpr, traced.consts, jax.tree.leaves((params, state, batch)), made)
    return None if _finite(value) else _origin(value, made)


def _run(jaxpr: Any, consts: Any, given: Any, made: dict) -> list[Any]:
    """Evaluates `jaxpr`, one operation after another. Adds to `made`, by a value's `id`, the
    operation that computed it, its inputs and its results. Storing the results keeps ids unique."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *given], strict=True))
    for operation in jaxpr.eqns:
        read = [v.val if isinstance(v, Literal) else known[v] for v in operation.invars]
        inner = next((p for p in operation.params.values() if hasattr(p, "jaxpr")), None)
        if inner is not None and operation.primitive.name not in ("scan", "while", "shard_map"):
            results = _run(inner.jaxpr, inner.consts, read, made)
        else:
            results = operation.primitive.bind(*read, **operation.params)
            results = results if operation.primitive.multiple_results else [results]
            made.update((id(result), (operation, read, results)) for result in results)
        known |= zip(operation.outvars, results, strict=True)
    return [v.val if isinstance(v, Literal) else known[v] for v in jaxpr.outvars]


def _origin(value: Any, made: dict) -> Fact | None:
    """Returns the operation that computed a result that is not finite from finite inputs. Searches
    back from `value` through the operations in `made`."""
    while (found := made.get(id(value))) is not None:
        operation, read, _ = found
        bad = [x for x in read if not _finite(x)]
        if not bad:
            name, trace = operation.primitive.name, operation.source_info.traceback
            frames = [(f.file_name, f.line_num) for f in trace.frames] if trace is not None else []
            line = own_line(frames)
            what = _OPERATIONS.get(name, f"the operation {name}")
            return fact(
                "cause-operation", what=what, operation=name, where=f" at {line}" if line else ""
            )
        value = next((x for x in bad if bool(jnp.isnan(x).any())), bad[0])
    return None


def _finite(value: Any) -> bool:
    value = jnp.asarray(value)
    return not jnp.issubdtype(value.dtype, jnp.floating) or bool(jnp.isfinite(value).all())
