"""What is learned: two pure functions, the data, and sums instead of means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..errors import RecipeError, invalid, unknown
from ..words.figures import one_line
from .source import Source

Tree = Any  # a pytree of arrays
RETURNS = ("logits", "probabilities", "values")
"""What a model's outputs may be."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sum:
    """A total and the number of values in it; the library divides, once, at the end.

    Means of parts cannot be combined without knowing how large the parts were. Sums can: over
    examples, replicas, devices and evaluation batches, however they are cut.

    *Fields:* `total`, an array of any shape; `count`, of the same shape or `()`; `finish`,
    `(total, count) -> value`, for a metric that is not a mean, such as F1 from three counts. It is called
    once, on the host, with float64 NumPy arrays of everything added up, and returns a number or an
    array; it is not part of the traced program, so it must not use the loss's arrays. See `cw.metrics`;
    `each`: see `of_each`.
    """

    total: Any
    count: Any
    finish: Callable[[Any, Any], Any] | None = field(default=None, metadata={"static": True})
    each: bool = field(default=False, metadata={"static": True})

    @classmethod
    def of(cls, values: jax.Array) -> Sum:
        """The sum of `values` `(batch, ...)` over examples, counting each example once."""
        if isinstance(values, Sum):
            raise RecipeError("sum-of-a-sum", "Sum.of was given a Sum, expected values (batch, ...).")
        values = jnp.asarray(values)
        dtype = jnp.float64 if values.dtype == jnp.float64 else jnp.float32
        return cls(jnp.sum(values, axis=0, dtype=dtype), jnp.float32(values.shape[0]))

    @classmethod
    def of_each(cls, values: jax.Array, finish: Callable[[Any, Any], Any]) -> Sum:
        """Keeps `values` `(batch, ...)` of each example instead of adding them, for a metric that must see
        all examples at once, such as a rank: `finish(values, count)` gets those of the whole set, in its
        order. Evaluation has such metrics; training, whose sums stay on the device, leaves them out."""
        values = jnp.asarray(values)
        return cls(values, jnp.float32(values.shape[0]), finish, True)

    @property
    def value(self) -> Any:
        """`finish(total, count)`; without a `finish`, `total / count`."""
        if self.finish is None:
            return self.total / self.count
        return self.finish(self.total, self.count)


class Loss(Protocol):
    def __call__(
        self, params: Tree, state: Tree, batch: dict[str, jax.Array], key: jax.Array, train: bool
    ) -> tuple[Mapping[str, Sum], Tree]: ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned. Nothing here knows the machine, the batch size or the optimizer.

    *Arguments* (keyword only):

    - `init`: `(key) -> (params, state)`. `state` holds what the loss updates itself, such as
      batch-norm statistics; `{}` when there is none.
    - `loss`: `(params, state, batch, key, train) -> (metrics, state)`. `batch` is a dict of arrays
      `(replica_batch, ...)`; `metrics` a dict of `Sum` with at least `"loss"`, whose total over
      count is minimised. With `train=False` an example's result must not depend on the rest of the
      batch: evaluation pads and masks. In bf16, floating columns come as bfloat16, but for
      `label`, which keeps its digits.
    - `train`, `eval`: sources: `len()` and `[i] -> dict of arrays`. `eval` may be `None`.
    - `augment`: `(example, key) -> example`, one unbatched example, traced, runs on the device; its
      key depends on the seed, the epoch and the example only.
    - `mix`: `(batch, key) -> batch` within one replica, for mixup and the like.
    - `classes`: when given, the column `"label"` is checked to lie in `[0, classes)`.
    - `predict`: `(params, state, inputs) -> outputs`, what the trained model predicts for `inputs`, the
      columns of a batch without `label`: an array `(batch, ...)` or a dict of such arrays. Examples must
      not depend on each other. `cw.predict` and `cw.export` run it.
    - `decode`: `(params, state, tokens, cache, position) -> (logits, cache)`, for `cw.deploy.generate`: the
      logits `(batch, t, vocabulary)` of what follows `tokens` `(batch, t)` int32, which stand at `position`
      `(batch,)` and behind; t is 1, or they begin at position 0. `cache`: what an earlier call returned, a
      tree of arrays with room for a number of positions; None: make it, with room for these. What is computed
      at a position again replaces what was there. `context`: the most positions that it takes.
    - `returns`: what these outputs are: "logits", "probabilities" or "values". By default, with `classes`, an
      array `(batch, classes)` is probabilities if a softmax or sigmoid is the last operation of `predict`,
      else logits; all else is values.
    - `class_names`: the names of the classes, in order.
    - `from_data`: `(train) -> {path: array}`: initial values of parameters such as "whiten/kernel", computed
      from the training source once, before the first step of a run.
    - `sharding`: `(path) -> PartitionSpec`: the axis along which a parameter such as "words/embedding" is cut
      if the recipe has `shards`: `P(None, "shard")`; None for the default, the largest axis that `shards`
      divides.
    - `weights`: the digests of the files that the initial values are from, the latest last, set by
      `cw.pretrained(...).start`.
    - `going_on`: arrays of another run's training state by name, with which training begins at step 0, set by
      `cw.pretrained(run, optimizer=True).start`.
    """

    init: Callable[[jax.Array], tuple[Tree, Tree]]
    loss: Loss
    train: Source
    eval: Source | None = None
    augment: Callable[[dict, jax.Array], dict] | None = None
    mix: Callable[[dict, jax.Array], dict] | None = None
    classes: int | None = None
    predict: Callable[[Tree, Tree, dict[str, jax.Array]], Any] | None = None
    decode: Callable[[Tree, Tree, jax.Array, Any, jax.Array], tuple[jax.Array, Any]] | None = None
    context: int | None = None
    returns: str | None = None
    class_names: tuple[str, ...] = ()
    from_data: Callable[[Source], Mapping[str, Any]] | None = None
    sharding: Callable[[str], PartitionSpec | None] | None = None
    weights: tuple[str, ...] = ()
    going_on: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "class_names", tuple(self.class_names))
        if self.class_names and self.classes not in (None, len(self.class_names)):
            expected = f"classes={self.classes}"
            raise invalid("class-names-number", "the number of class_names", len(self.class_names), expected)
        if self.returns not in (None, *RETURNS):
            raise unknown("task-returns", "kind of outputs", self.returns, RETURNS)
        for name in ("init", "loss", "augment", "mix", "predict", "decode", "from_data", "sharding"):
            given = getattr(self, name)
            if not callable(given) and (given is not None or name in ("init", "loss")):
                raise invalid("task-function-expected", f"Task.{name}", given, "a function", name=name)
        if (self.decode is None) != (self.context is None):
            raise invalid(
                "task-context", "context", self.context, "the most positions of decode, with decode"
            )
        for name in ("train", "eval"):
            given = getattr(self, name)
            if given is None and name == "eval":
                continue
            if hasattr(given, "dataset") and hasattr(given, "batch_sampler"):
                raise RecipeError("data-loader-given", name=name)
            if isinstance(given, Mapping) or not (
                hasattr(given, "__len__") and hasattr(given, "__getitem__")
            ):
                expected = (
                    "len() and [i] -> dict of arrays, as cw.Arrays(image=x, label=y), or one of its splits"
                )
                raise invalid("task-source-expected", f"Task.{name}", given, expected, name=name)

    @property
    def has_batch_norm(self) -> bool:
        """Whether the state holds running statistics: a mean and a variance side by side, floats of one shape
        (`mean` and `var`, as in Flax, or `running_mean` and `running_var`). Nothing is computed."""
        _, state = jax.eval_shape(self.init, jax.eval_shape(lambda: jax.random.key(0)))
        places: dict[str, dict[str, Any]] = {}
        for path, leaf in by_path(state).items():
            *place, name = path.split("/")
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                short = name.removeprefix("running_").removeprefix("moving_")
                places.setdefault("/".join(place), {})[short] = leaf.shape
        return any(
            "mean" in leaves and leaves["mean"] == leaves.get("var", leaves.get("variance"))
            for leaves in places.values()
        )


def by_path(tree: Tree, separator: str = "/", is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of `tree` in JAX's order by their paths, such as `block1/conv/kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator=separator): leaf for path, leaf in leaves}


def finished(sums: Mapping[str, Sum]) -> dict[str, float | np.ndarray]:
    """The values of sums, divided or finished on the host: metric name to a float, or a float64 array. A
    division by zero gives NaN or an infinity.

    *Arguments:* `sums` of everything that is to be counted, as arrays on the host. The arithmetic is
    float64: float32 would round a ratio that the sums still know exactly.

    Raises `RecipeError` when a task's own `finish` fails, or returns anything but numbers.
    """
    values: dict[str, float | np.ndarray] = {}
    for name, s in sums.items():
        total, count = np.asarray(s.total, np.float64), np.asarray(s.count, np.float64)
        try:
            with np.errstate(all="ignore"):
                value = np.asarray(Sum(total, count, s.finish).value, np.float64)
        except Exception as error:
            about = {"total": list(total.shape), "count": list(count.shape), "reason": one_line(error)}
            raise RecipeError("finish-failed", metric=name, error=type(error).__name__, **about) from error
        values[name] = float(value) if value.ndim == 0 else value
    return values
