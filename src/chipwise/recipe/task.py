"""The task to learn: two pure functions, the data, and sums instead of means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..base import Fact, RecipeError, fact, invalid, unknown
from ..base.annotations import as_annotated
from ..base.figures import one_line
from .direction import declared
from .source import Source, check_source
from .user_code import where_of

Tree = Any  # a pytree of arrays
RETURNS = ("logits", "probabilities", "values")
"""The kinds of a model's outputs."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sum:
    """A total and the number of values in it. The library divides once, at the end.

    Means of parts cannot be combined without knowing how large the parts were. Sums can be combined
    over examples, replicas, devices and evaluation batches, however they are cut.

    *Fields:*

    - `total`: an array of any shape.
    - `count`: an array of the same shape or `()`.
    - `finish`: `(total, count) -> value`, for a metric that is not a mean, such as F1 from three
      counts. It is called once, on the host, with float64 NumPy arrays of everything added up, and
      returns a number or an array. It is not part of the traced program, so it must not use the
      loss's arrays. See `cw.metrics`.
    - `each`: see `of_each`.
    - `better`: `"lower"` or `"higher"`, which of its values is better. None: `Task.better` or the
      metric's name says it.
    """

    total: Any
    count: Any
    finish: Callable[[Any, Any], Any] | None = field(default=None, metadata={"static": True})
    each: bool = field(default=False, metadata={"static": True})
    better: str | None = field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, values: jax.Array, *, better: str | None = None) -> Sum:
        """The sum of `values` `(batch, ...)` over examples, counting each example once."""
        if isinstance(values, Sum):
            raise RecipeError(
                "sum-of-a-sum", "Sum.of was given a Sum, expected values (batch, ...)."
            )
        values = jnp.asarray(values)
        dtype = jnp.float64 if values.dtype == jnp.float64 else jnp.float32
        total = jnp.sum(values, axis=0, dtype=dtype)
        return cls(total, jnp.float32(values.shape[0]), better=better)

    @classmethod
    def of_each(
        cls, values: jax.Array, finish: Callable[[Any, Any], Any], *, better: str | None = None
    ) -> Sum:
        """Keeps `values` `(batch, ...)` of each example instead of adding them. This is for a
        metric that must see all examples at once, such as a rank. `finish(values, count)` gets the
        values of the whole set, in its order. Evaluation has such metrics. Training leaves them
        out, because its sums stay on the device."""
        values = jnp.asarray(values)
        return cls(values, jnp.float32(values.shape[0]), finish, True, better)

    @property
    def value(self) -> Any:
        """`finish(total, count)`, or `total / count` without a `finish`."""
        if self.finish is None:
            return self.total / self.count
        return self.finish(self.total, self.count)


class Loss(Protocol):
    def __call__(
        self, params: Tree, state: Tree, batch: dict[str, jax.Array], key: jax.Array, train: bool
    ) -> tuple[Mapping[str, Sum], Tree]: ...


@as_annotated
@dataclass(frozen=True, kw_only=True)
class Task:
    """The task to learn. Nothing here depends on the machine, the batch size or the optimizer.

    *Arguments* (keyword only):

    - `init`: `(key) -> (params, state)`. `state` holds what the loss updates itself, such as
      batch-norm statistics, or `{}`. After a step, floats are the mean of all replicas. Whole
      numbers, and random keys of `jax.random.key`, are those of replica 0.
    - `loss`: `(params, state, batch, key, train) -> (metrics, state)`. `batch` is a dict of arrays
      `(replica_batch, ...)`. `metrics` is a dict of `Sum` with at least `"loss"`, whose total over
      count is minimised. In evaluation, with `train=False`, `batch` is one example, or a group (see
      `eval_group`). `key` is then the group's own, the same at every evaluation of a seed's runs.
      So the noise of a diffusion net or a VAE is drawn as in training, and moves no metric from one
      evaluation to the next. In bf16, floating columns come as bfloat16, except those of
      `uncast`.
    - `train`, `eval`: sources, with `len()` and `[i] -> dict of arrays`. `eval` may be `None`. If
      both state the names of their classes, the labels of `eval` are joined to those of `train` by
      name. A class that `train` lacks is refused.
    - `eval_group`: the consecutive examples that evaluation gives the loss at once. The last group
      may be smaller. Use 1, unless the loss compares examples, as contrastive ones do.
    - `augment`: `(example, key) -> example` for one unbatched example. It is traced and runs on the
      device. Its key depends on the seed, the epoch and the example only.
    - `mix`: `(batch, key) -> batch` within one replica, for mixup and the like.
    - `classes`: when given, the column `"label"` is checked to be in `[0, classes)`.
    - `predict`: `(params, state, inputs) -> outputs`, the trained model's prediction for `inputs`,
      the columns of a batch without `label`. It returns an array `(batch, ...)` or a dict of such
      arrays. Examples must not depend on each other. `cw.predict` and `cw.export` run it.
    - `decode`: `(params, state, tokens, cache, position) -> (logits, cache)`, for
      `cw.deploy.generate`. It returns the logits `(batch, t, vocabulary)` of what follows `tokens`
      `(batch, t)` int32. The tokens are at `position` `(batch,)` and behind. t is 1, or they begin
      at position 0. `cache` is the result of an earlier call, a tree of arrays with room for a
      number of positions. With None, the function creates it, with room for these tokens. Computing
      a position again replaces the earlier values.
    - `context`: the most positions that `decode` takes.
    - `returns`: the kind of these outputs: "logits", "probabilities" or "values". By default, with
      `classes`, an array `(batch, classes)` is probabilities if a softmax or sigmoid is the last
      operation of `predict`, else logits. Where no linear layer or log-softmax is the last,
      `predict` says so. All else is values.
    - `class_names`: the names of the classes, in order, for predictions. By default those of
      `train`. Other names than `train` states are allowed, the same names in another order are not.
    - `better`: which way metrics are better, such as `{"bpb": "lower", "top5": "higher"}`. It
      counts before `Sum.better` and names. See `docs/metrics.md`.
    - `from_data`: `(train) -> {path: array}`. It gives initial values of parameters such as
      "whiten/kernel", computed from the training source once, before the first step of a run.
    - `sharding`: `(path) -> PartitionSpec`. It gives the axis along which a parameter such as
      "words/embedding" is cut if the recipe has `shards`: `P(None, "shard")`. None means the
      default, the largest axis that `shards` divides.
    - `weights`: the digests of the files that the initial values are from, the latest last.
      `cw.pretrained(...).start` sets it.
    - `texts`: what is known of a language model's texts. `begin` and `end`: the tokens before and
      after each document, those of `train` if nothing is given. By name the files of a Hugging Face
      folder that say more, such as `tokenizer_config.json`, which `cw.pretrained(...).start` sets
      and `cw.export` writes again.
    - `weights_read`: facts on how weights were understood, which a run shows and stores.
      `cw.pretrained(...).start` sets it.
    - `start_state`: arrays of another run's training state by name, with which training begins at
      step 0. `cw.pretrained(run, optimizer=True).start` sets it.
    - `framework`: the framework of the user's model, such as "torch", or `None` for functions of
      JAX. `cw.torch.task` and its like set it.
    - `read`: what these read of the model, its data and its loss, by name. A run shows and stores
      it.
    - `uncast`: the columns that keep their digits in bf16 and f16: what is to be learned.
    - `frozen`: patterns of parameters that training leaves alone, before those of
      `Recipe(frozen=...)`, which may take them back: `("!head/*",)`.
    """

    init: Callable[[jax.Array], tuple[Tree, Tree]]
    loss: Loss
    train: Source
    eval: Source | None = None
    eval_group: int = 1
    augment: Callable[[dict, jax.Array], dict] | None = None
    mix: Callable[[dict, jax.Array], dict] | None = None
    classes: int | None = None
    predict: Callable[[Tree, Tree, dict[str, jax.Array]], Any] | None = None
    decode: Callable[[Tree, Tree, jax.Array, Any, jax.Array], tuple[jax.Array, Any]] | None = None
    context: int | None = None
    returns: str | None = None
    class_names: tuple[str, ...] = ()
    better: Mapping[str, str] = field(default_factory=dict, hash=False)
    from_data: Callable[[Source], Mapping[str, Any]] | None = None
    sharding: Callable[[str], PartitionSpec | None] | None = None
    weights: tuple[str, ...] = ()
    texts: Mapping[str, Any] = field(default_factory=dict, hash=False)
    weights_read: tuple[Fact, ...] = field(default=(), compare=False, repr=False)
    start_state: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    framework: str | None = None
    read: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    frozen: tuple[str, ...] = ()
    uncast: tuple[str, ...] = ("label",)

    def __post_init__(self):
        object.__setattr__(self, "class_names", tuple(self.class_names))
        object.__setattr__(self, "better", declared(self.better))
        if self.class_names and self.classes not in (None, len(self.class_names)):
            expected = f"classes={self.classes}"
            raise invalid(
                "class-names-number", "the number of class_names", len(self.class_names), expected
            )
        if self.returns not in (None, *RETURNS):
            raise unknown("task-returns", "kind of outputs", self.returns, RETURNS)
        if (self.decode is None) != (self.context is None):
            raise invalid(
                "task-context", "context", self.context, "the most positions of decode, with decode"
            )
        if self.eval_group < 1:
            expected = "a whole number of at least 1"
            raise invalid("eval-group", "eval_group", self.eval_group, expected)
        for name in ("train", "eval"):
            given = getattr(self, name)
            if given is None and name == "eval":
                continue
            if hasattr(given, "dataset") and hasattr(given, "batch_sampler"):
                raise RecipeError("data-loader-given", name=name)
            if hasattr(given, "use_multiprocessing") and hasattr(given, "max_queue_size"):
                raise RecipeError("py-dataset-given", name=name)  # Keras' PyDataset or Sequence
            check_source(given, f"Task.{name}", name=name)
        object.__setattr__(self, "eval", self.joined(self.eval))

    @property
    def known_texts(self) -> dict[str, Any]:
        """`texts`, with the tokens before and after a document of the training data."""
        return {**getattr(self.train, "document_ends", {}), **self.texts}

    @property
    def shown(self) -> Fact | None:
        """What was `read`, as a run's first lines have it. None for functions of JAX."""
        parts = [f"{name}: {text}" for name, text in self.read.items()]
        return fact("model-read", read=parts) if parts else None

    def directions_of(self, sums: Mapping[str, Any]) -> dict[str, str]:
        """The declared directions. Without evaluation data, only those of `sums`, since the metrics
        of an evaluation alone are unknown."""
        return {n: way for n, way in self.better.items() if self.eval is not None or n in sums}

    def joined(self, source: Any) -> Any:
        """`source` with the labels of the training data: see `chipwise.data.class_names`."""
        from ..data.class_names import joined, names_in

        return joined(names_in(self), source)

    @property
    def has_batch_norm(self) -> bool:
        """Whether the state has running statistics: a mean and a variance side by side, floats of
        one shape (`mean` and `var`, as in Flax, or `running_mean` and `running_var`). Computes
        nothing."""
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


def by_path(
    tree: Tree, separator: str = "/", is_leaf: Callable[[Any], bool] | None = None
) -> dict[str, Any]:
    """The leaves of `tree` in JAX's order by their paths, such as `block1/conv/kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {
        jax.tree_util.keystr(path, simple=True, separator=separator): leaf for path, leaf in leaves
    }


def finished(sums: Mapping[str, Sum]) -> dict[str, float | np.ndarray]:
    """The values of sums, divided or finished on the host: metric name to a float, or a float64
    array. A division by zero gives NaN or an infinity.

    *Arguments:* `sums`: the sums of everything to be counted, as arrays on the host. The arithmetic
    is float64, because float32 would round a ratio that the sums still give exactly.

    Raises `RecipeError` when a task's own `finish` fails, or returns anything but numbers.
    """
    values: dict[str, float | np.ndarray] = {}
    for name, s in sums.items():
        total = np.asarray(s.total, np.float64)
        count = np.asarray(s.count, np.float64)
        try:
            with np.errstate(all="ignore"):
                value = np.asarray(Sum(total, count, s.finish).value, np.float64)
        except Exception as error:
            raise RecipeError(
                "finish-failed",
                metric=name,
                error=type(error).__name__,
                total=list(total.shape),
                count=list(count.shape),
                reason=one_line(error),
                where=where_of(error),
            ) from error
        values[name] = float(value) if value.ndim == 0 else value
    return values
