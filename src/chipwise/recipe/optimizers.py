"""Optimizers: values with settings, and one pure update with its rates as inputs.

    opt_state = optimizer.init(params)
    params, opt_state = optimizer.update(grads, opt_state, params, {"lr": lr, "momentum": m, ...})

Every hyperparameter that may vary is a schedule in `optimizer.hyper`. Its value at the step is
passed to `update` as a () float32 array. A schedule, a finder or a changed rate therefore never
recompiles the step, and the compiled step of a plan is the step of a run.

`grads` is the MEAN gradient of the loss over the global batch, already summed over replicas and
devices. Clipping and weight decay happen here, once, after that reduction. A decay added inside
each replica and then summed acts `replicas` times too strongly, and ties a recipe to a core count.

    optimizer = sgd(lr=one_cycle(0.4, warmup="5ep"), momentum=0.9, nesterov=True, weight_decay=5e-4)

The mathematics is optax's. Each function names its PyTorch equivalent. It runs in float32 (or
wider, if a parameter is), and parameters keep their dtype. Long because what an optimizer is cannot
be read without one.
"""

from __future__ import annotations

import fnmatch
import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..base import Fact, RecipeError, invalid, unknown
from ..base.annotations import as_annotated
from .by_value import by_value
from .duration import Clock
from .group_members import group_members
from .random_keys import as_data, as_keys
from .schedules import Schedule, as_schedule, callable_name, constant, held, plain

Tree = Any
Scalars = dict[str, Any]
Decay = str | Callable[[str, Any], bool]
"""The parameters that decay: "all", "kernels", or a function of a leaf's path and the leaf."""


class Optimizer(ABC):
    """The optimizer of a recipe, which the step calls. Subclasses are frozen dataclasses."""

    usual_rates: ClassVar[tuple[float, float] | None] = None
    """The peak rates between which most nets train, where they are known."""
    rate_power: ClassVar[float | None] = None
    """The power of the batch to which the rate is proportional, where it is known."""
    held_values: int | None = None
    """How many values the parameters of PyTorch's optimizer have that this was read from."""

    @property
    @abstractmethod
    def hyper(self) -> dict[str, Schedule]:
        """The inputs of `update`, by name, each with its schedule."""

    @property
    def lr_name(self) -> str:
        """The key of `hyper` that is the learning rate."""
        return "lr"

    @property
    @abstractmethod
    def elementwise(self) -> bool:
        """Whether each value of a parameter moves by its own gradient, state, answer of `decay`,
        and the scalars alone (`clip`'s global norm aside). Parameters may then be cut anywhere."""

    def layers(self, params: Tree) -> list[int]:
        """The number of layers in each leaf of `params`. It is more than one if each row of the
        leaf is updated as a leaf of its own. These are the leaves at paths of the pattern
        `stacked`, if the optimizer has one."""
        paths, _ = jax.tree_util.tree_flatten_with_path(params)
        return [
            (int(leaf.shape[0]) or 1) if self._is_stacked(path, leaf) else 1 for path, leaf in paths
        ]

    def _is_stacked(self, path: Any, leaf: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        pattern = getattr(self, "stacked", "")
        return leaf.ndim > 1 and fnmatch.fnmatchcase(name, pattern)

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The settings by name, as they were given: numbers, schedules, words."""

    @abstractmethod
    def _with(self, settings: dict[str, Any]) -> Optimizer:
        """This optimizer with some of its settings replaced."""

    @abstractmethod
    def _about(self) -> dict[str, Any]:
        """The kind of this optimizer as JSON values, with its name as `optimizer`."""

    def rate_factor(self, k: Fraction) -> Fraction | float | None:
        """The factor of the rate at `k` times the batch. It is `k` for `sgd` (Goyal et al., 2017),
        its root for Adam's kind (Malladi et al., 2022), and None without a known rule."""
        if self.rate_power is None:
            return None
        return k if self.rate_power == 1 else math.sqrt(k)

    def replace(self, **settings: Any) -> Optimizer:
        """This optimizer with other `settings`. Raises `RecipeError` for an unknown name."""
        for name in settings:
            if name not in self.settings:
                kind = self._about()["optimizer"]
                known = list(self.settings)
                raise unknown("no-such-setting", f"setting of {kind}", name, known, optimizer=kind)
        return self._with(settings)

    def held(self, clock: Clock) -> Optimizer:
        """This optimizer for a run that continues after the end of `clock`. Schedules then keep
        their last value, and have the same bits before."""
        varying = {n: held(s, clock) for n, s in self.hyper.items() if not isinstance(s, constant)}
        return self._with(varying)

    def of_values(self, count: int | None) -> Optimizer:
        """This new optimizer with `count` as its `held_values`, which are no setting."""
        object.__setattr__(self, "held_values", count)
        return self

    def describe(self) -> dict[str, Any]:
        """All settings as JSON values, for the run folder and for comparing runs. Schedules are
        their `json()`."""
        return self._about() | {name: plain(value) for name, value in self.settings.items()}

    @abstractmethod
    def _transform(self, hyper: Scalars, decaying: Tree, norm: Any) -> optax.GradientTransformation:
        """The optax chain with `hyper`'s scalars in place. The structure of its state never depends
        on them.

        `decaying`: the values that decay, a tree like the parameters or a prefix of it, of bools or
        arrays of them. `norm`: the gradient's global norm, for clipping.
        """

    def decaying(self, params: Tree) -> Tree:
        """The decision for each leaf of `params` whether it decays, as a tree of bools."""
        return decays(params, getattr(self, "decay", "all"))

    def kinds(self, params: Tree) -> Tree | None:
        """The name of the rule that moves each leaf of `params` if there are several rules, else
        `None`."""
        return None

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns for the paths of parameters with settings of their own. See `grouped`."""
        return ()

    def members(self, params: Tree) -> Tree:
        """The index in `patterns` that each leaf of `params` belongs to, -1 for none."""
        return group_members(params, self.patterns)

    def init(self, params: Tree, varied: Iterable[str] = ()) -> Tree:
        """The state before the first step: arrays only, float32 where `params` are narrower, and
        the words of random keys (`random_keys`). `varied`: the settings with a value for each of
        `params`, which is a vector then."""
        wide, _ = _widen(params)
        values = {
            name: s.value if isinstance(s, constant) else np.nan for name, s in self.hyper.items()
        }
        hyper: Scalars = {name: np.float32(value) for name, value in values.items()}
        hyper |= {name: np.full(wide.shape, hyper[name]) for name in varied}
        with _optax_dtypes():
            return as_data(self._transform(hyper, True, None).init(wide))

    def update(
        self,
        grads: Tree,
        opt_state: Tree,
        params: Tree,
        hyper: Scalars,
        *,
        decaying: Tree | None = None,
        norm: Any = None,
        members: Any = None,
    ) -> tuple[Tree, Tree]:
        """Takes one step: `(new_params, new_opt_state)`, with the structure, shapes and dtypes of
        the old.

        Arguments: `grads`: the mean gradient, a tree like `params`. `hyper`: a () array or number
        for each key of `self.hyper`.

        An elementwise optimizer also accepts a vector or a part of one in place of the tree. Then
        `decaying`, bools of its shape, says which values decay. `norm` `()` is the global norm of
        the whole gradient. `members`, whole numbers of its shape, says which of `patterns` each
        value belongs to.

        Raises `RecipeError` when `hyper` has other keys or a value is not a scalar.
        """
        wide, dtype = _widen(params)
        grads = jax.tree.map(lambda g: jnp.asarray(g).astype(dtype), grads)
        scalars = self._scalars(hyper, dtype)
        if decaying is None:
            decaying = self.decaying(params)
        if norm is None and "clip" in scalars:
            squares = [jnp.sum(g * g) for g in jax.tree.leaves(grads)]
            norm = jnp.sqrt(sum(squares[1:], start=squares[0]))
        with _optax_dtypes():
            state = as_keys(opt_state)
            moved, state = self._apply(grads, state, wide, scalars, decaying, norm, members)
        moved = jax.tree.map(lambda new, old: new.astype(jnp.asarray(old).dtype), moved, params)
        return moved, as_data(state)

    def _apply(
        self,
        grads: Tree,
        opt_state: Tree,
        params: Tree,
        scalars: Scalars,
        decaying: Tree,
        norm: Any,
        members: Any,
    ) -> tuple[Tree, Tree]:
        """`update` of arrays in one dtype."""
        updates, opt_state = self._transform(scalars, decaying, norm).update(
            grads, opt_state, params
        )
        return optax.apply_updates(params, updates), opt_state

    def tables(
        self, clock: Clock, start: int = 0, stop: int | None = None
    ) -> dict[str, np.ndarray]:
        """`hyper` as tables: for each key, the values of steps `start` to `stop - 1`, float32."""
        return {name: schedule.table(clock, start, stop) for name, schedule in self.hyper.items()}

    def warnings(self, clock: Clock) -> list[Fact]:
        """The settings that are probably not meant on this clock, each fact with its `setting`."""
        return [
            fact for name, schedule in self.hyper.items() for fact in schedule.warnings(clock, name)
        ]

    def _scalars(self, hyper: Scalars, dtype: Any) -> Scalars:
        if set(hyper) != set(self.hyper):
            expected = f"exactly {sorted(self.hyper)}"
            raise invalid("hyperparameters-differ", "the hyperparameters", sorted(hyper), expected)
        scalars = {name: jnp.asarray(value).astype(dtype) for name, value in hyper.items()}
        for name, value in scalars.items():
            if value.shape != ():
                raise invalid(
                    "hyperparameter-shape",
                    f"the shape of {name}",
                    value.shape,
                    "(), one number",
                    name=name,
                )
        return scalars


def decays(params: Tree, decay: Decay) -> Tree:
    """A tree of bools that says which leaves of `params` decay.

    `decay` is "all", or "kernels", or a function of a leaf's path, such as "block1/conv/kernel",
    and the leaf. "kernels" are the leaves of 2 or more axes, which leaves out biases and
    normalization.

    Raises `RecipeError` when the function returns something other than a bool.
    """

    def chosen(path: Any, leaf: Any) -> bool:
        if decay == "all":
            return True
        if decay == "kernels":
            return jnp.ndim(leaf) >= 2
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        answer = decay(name, leaf)  # type: ignore[operator]
        if not isinstance(answer, bool | np.bool_):
            raise invalid(
                "decay-answer", f"decay('{name}', leaf)", answer, "True or False", path=name
            )
        return bool(answer)

    return jax.tree_util.tree_map_with_path(chosen, params)


def _optax_dtypes() -> Any:
    # optax's Adam raises its float32 decay to an int32 count, which a program under strict
    # promotion refuses. Everything floating is one dtype by here, so standard promotion cannot
    # change a result.
    return jax.numpy_dtype_promotion("standard")


def _widen(params: Tree) -> tuple[Tree, Any]:
    """`params` in one dtype, float32 or wider, and that dtype. A tree of float32 is not copied."""
    leaves = [jnp.asarray(leaf).dtype for leaf in jax.tree.leaves(params)]
    wrong = [str(dtype) for dtype in leaves if not jnp.issubdtype(dtype, jnp.floating)]
    if wrong:
        raise RecipeError("parameters-without-gradient", dtypes=sorted(set(wrong)))
    dtype = max([jnp.dtype(jnp.float32), *leaves], key=lambda d: d.itemsize)
    return jax.tree.map(lambda p: jnp.asarray(p).astype(dtype), params), dtype


_Parts = list[optax.GradientTransformation]

_INPUTS = ("lr", "b1", "b2")
_AVERAGES = ("momentum", "b1", "b2", "rho", "beta_1", "beta_2", "dampening")
_NOT_NEGATIVE = (
    *("lr", "eps", "epsilon", "weight_decay", "l2", "trust", "lr_decay", "momentum_decay"),
    *("initial_accumulator_value", "lambd", "alpha"),
)
_OPTIONAL = ("momentum", "weight_decay", "l2", "clip")
"""Settings that are inputs of the step only where they are not None and not exactly 0."""

STACKED = "*stack/*"
"""The pattern for paths whose leaves have a layer in each row, as in
`models.transformer.Blocks`."""

HIGHEST_ADAM = 0.03
"""The rate of Adam from which few nets train, since every weight may move by this much a step. A
rule of thumb."""


LATER = {"later": True}
"""The metadata of fields that came after runs were stored without them. They are described where
they are not their default."""


class _Named(Optimizer):
    """The optimizers whose settings are the fields of a dataclass."""

    def __post_init__(self) -> None:
        _check(self, self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    @property
    def hyper(self) -> dict[str, Schedule]:
        given = self.settings
        used = [name for name in _INPUTS if name in given]
        used += [name for name in _OPTIONAL if not _is_zero(given.get(name))]
        used += ["adam_lr"] * (given.get("adam_lr") is not None)  # of 0, it is a rate
        return {name: as_schedule(given[name], name) for name in used}

    def _with(self, settings: dict[str, Any]) -> Optimizer:
        made: Optimizer = replace(self, **settings)  # type: ignore[type-var]
        return made.of_values(self.held_values)

    def _about(self) -> dict[str, Any]:
        return {"optimizer": type(self).__name__}

    def describe(self) -> dict[str, Any]:
        given = self.settings
        optional = [f for f in fields(self) if f.metadata]  # type: ignore[arg-type]
        usual = [f.name for f in optional if given[f.name] == f.default]
        return {name: value for name, value in super().describe().items() if name not in usual}


class _Elementwise(_Named):
    """Clip, add `l2`, move, and take a step of `lr`."""

    maximize: bool

    @property
    def elementwise(self) -> bool:
        return True

    def _transform(self, hyper: Scalars, decaying: Tree, norm: Any) -> optax.GradientTransformation:
        return optax.chain(
            *_clipped(hyper, norm),
            *([optax.scale(-1.0)] if self.maximize else []),
            *_decayed(hyper, decaying, "l2"),
            *self._moving(hyper, _decayed(hyper, decaying)),
            self._stepping(hyper),
        )

    @abstractmethod
    def _moving(self, hyper: Scalars, decay: _Parts) -> _Parts:
        """The transforms of the clipped gradient, with `decay` where it belongs."""

    def _stepping(self, hyper: Scalars) -> optax.GradientTransformation:
        """The last transform."""
        return optax.scale_by_learning_rate(hyper["lr"])


@as_annotated
@dataclass(frozen=True)
class sgd(_Elementwise):
    """Stochastic gradient descent with momentum and coupled L2 decay, as `torch.optim.SGD`.

        g = grad + weight_decay * p;  v = momentum * v + g
        p = p - lr * (g + momentum * v if nesterov else v)

    Arguments:

    - `lr`, `momentum` and `weight_decay`: a number or a schedule each.
    - `decay`: which parameters decay (see `decays`).
    - `clip`: the largest global norm of the gradient, a number, a schedule or None. Clipping comes
      before the decay is added.
    - `dampening`: `v = momentum * v + (1 - dampening) * g` after the first step.
    - `maximize`: whether the loss is maximized.

    A `momentum` of exactly 0 keeps no velocity, and a `weight_decay` of exactly 0 adds nothing. In
    these cases they are not inputs of the step.

    The DavidNet code sums its loss and passes `lr / batch` and `weight_decay * batch`. On the mean
    gradient that is this rule with the undivided numbers.
    """

    lr: Any
    momentum: Any = 0.9
    nesterov: bool = False
    weight_decay: Any = 0.0
    decay: Decay = "all"
    clip: Any = None
    dampening: float = field(default=0.0, metadata=LATER)
    maximize: bool = field(default=False, metadata=LATER)

    usual_rates = (1e-3, 3.0)
    rate_power = 1.0

    def _moving(self, hyper: Scalars, decay: _Parts) -> _Parts:
        if "momentum" not in hyper:
            return decay
        momentum = hyper["momentum"]
        if not self.dampening:
            return [*decay, optax.trace(momentum, nesterov=self.nesterov)]

        def move(time, _, gradient, value, before):
            after = momentum * before + (1 - self.dampening) * gradient
            after = jnp.where(time == 1, gradient, after)
            return after, after

        return [*decay, by_value(move, (0.0,))]


@dataclass(frozen=True)
class _Adam(_Elementwise):
    """Adam's moments, and the decay outside of them."""

    lr: Any
    b1: Any = 0.9
    b2: Any = 0.999
    eps: float = 1e-8
    amsgrad: bool = field(default=False, kw_only=True, metadata=LATER)
    maximize: bool = field(default=False, kw_only=True, metadata=LATER)

    usual_rates = (1e-6, HIGHEST_ADAM)
    rate_power = 0.5

    def _moving(self, hyper: Scalars, decay: _Parts) -> _Parts:
        b1, b2, eps = hyper["b1"], hyper["b2"], self.eps
        if not self.amsgrad:
            return [optax.scale_by_adam(b1, b2, eps), *decay]

        def move(time, _, gradient, value, mean, squares, most):
            mean, squares = moments(hyper, gradient, mean, squares)
            most = jnp.maximum(most, squares)
            root = jnp.sqrt(most / (1 - b2**time))
            return mean / (1 - b1**time) / (root + eps), mean, squares, most

        return [by_value(move, (0.0, 0.0, 0.0)), *decay]


def moments(hyper: Scalars, gradient: Any, mean: Any, squares: Any) -> tuple[Any, Any]:
    """Adam's first and second moment after a step."""
    b1, b2 = hyper["b1"], hyper["b2"]
    return b1 * mean + (1 - b1) * gradient, b2 * squares + (1 - b2) * gradient * gradient


@as_annotated
@dataclass(frozen=True)
class adam(_Adam):
    """Adam, as `torch.optim.Adam` (Kingma & Ba, 2015, https://arxiv.org/abs/1412.6980).

    Arguments:

    - `lr`, `b1` and `b2`: a number or a schedule each.
    - `eps`: a number, added after the square root.
    - `clip` and `maximize` as in `sgd`.
    - `l2`: L2 in the gradient, PyTorch's `weight_decay` here, a number or a schedule. It is not a
      decay, since Adam divides by the gradient. Use `adamw` for that.
    - `decay`: which parameters have `l2`.
    - `amsgrad`: whether the largest second moment so far takes the place of the second moment
      (Reddi et al., 2018, https://arxiv.org/abs/1904.09237).
    """

    clip: Any = None
    l2: Any = field(default=0.0, metadata=LATER)
    decay: Decay = field(default="all", metadata=LATER)


@as_annotated
@dataclass(frozen=True)
class adamw(_Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`.

    Each decaying parameter also shrinks by `lr * weight_decay` of itself a step, outside the
    moments (Loshchilov & Hutter, 2019, https://arxiv.org/abs/1711.05101). As in PyTorch and optax,
    and unlike in the paper, the decay is multiplied by the learning rate. Arguments are those of
    `adam` but `l2`, and `weight_decay` (a number or a schedule) and `decay` as in `sgd`.
    """

    weight_decay: Any = 0.01
    decay: Decay = "all"
    clip: Any = None


@dataclass(frozen=True, repr=False)
class _FromOptax(Optimizer):
    make: Callable[..., optax.GradientTransformation]
    given: tuple[tuple[str, Any], ...]
    elementwise: bool = False  # type: ignore[misc]  # a field in the place of the property

    @property
    def hyper(self) -> dict[str, Schedule]:
        return {name: as_schedule(value, name) for name, value in self.given}

    @property
    def lr_name(self) -> str:
        for name in ("lr", "learning_rate"):
            if name in self.settings:
                return name
        raise RecipeError("no-rate", optimizer=repr(self), names=list(self.settings))

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.given)

    def _with(self, settings: dict[str, Any]) -> Optimizer:
        return replace(self, given=tuple((self.settings | settings).items()))

    def _about(self) -> dict[str, Any]:
        about = {"optimizer": "from_optax", "make": callable_name(self.make)}
        return about | ({"elementwise": True} if self.elementwise else {})

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.given)
        cut = ", elementwise=True" if self.elementwise else ""
        return f"from_optax({callable_name(self.make)}{cut}{given})"

    def _transform(self, hyper: Scalars, decaying: Tree, norm: Any) -> optax.GradientTransformation:
        return self.make(**hyper)

    def _apply(self, *given: Any) -> tuple[Tree, Tree]:
        try:
            return super()._apply(*given)
        except TypeError as error:  # optax has no way to ask beforehand
            _, more, names = str(error).partition(" required keyword-only argument")
            if not more:
                raise
            asked = re.findall("'(.+?)'", names)
            make = callable_name(self.make)
            raise RecipeError("optax-asks-for-more", optimizer=make, names=asked) from error


@as_annotated
def from_optax(
    make: Callable[..., optax.GradientTransformation], *, elementwise: bool = False, **hyper: Any
) -> Optimizer:
    """Any optax optimizer, such as `from_optax(optax.lion, learning_rate=cosine(1e-4), b1=0.9)`.

    `make` is called with the keywords of `hyper`. Each is a number or a schedule, and becomes an
    input of the step. Pass settings that do not vary, such as flags, counts, masks and starting
    values, beforehand: `from_optax(functools.partial(optax.lion, mask=mask), learning_rate=0.01)`.
    `elementwise=True` declares that `make` has the property of `Optimizer.elementwise`. That is
    true of Lion or RMSprop, but not of Adafactor or Shampoo, which need whole parameters. `make`
    must not branch on the numbers. A scheduled number is NaN in `init`, where it has no step, so a
    state computed from it cannot pass unseen.

    Raises `RecipeError` for a value that is neither a number nor a schedule.
    """
    if not callable(make) or not hyper:
        expected = (
            "an optimizer's maker, and its numbers by name: from_optax(optax.lion, "
            "learning_rate=1e-4)"
        )
        raise invalid("optax-maker-expected", "from_optax's first argument", make, expected)
    usual = {} if isinstance(make, type) else inspect.signature(make).parameters
    for name, value in hyper.items():
        counts = type(value) is int and name in usual and type(usual[name].default) is int
        if counts or isinstance(value, bool | str | None):
            expected = (
                f"a number that varies: use functools.partial({callable_name(make)}, "
                f"{name}={value!r})"
            )
            raise invalid("optax-setting-fixed", name, value, expected)
        as_schedule(value, name)
    return _FromOptax(make, tuple(hyper.items()), elementwise)


def _clipped(hyper: Scalars, norm: Any) -> _Parts:
    """Scales the gradient down to a global norm of `clip`, as `torch.nn.utils.clip_grad_norm_`."""
    if "clip" not in hyper:
        return []

    def clip(gradients: Tree, _: Tree) -> Tree:
        factor = jnp.where(norm < hyper["clip"], 1.0, hyper["clip"] / norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)

    return [optax.stateless(clip)]


def _decayed(hyper: Scalars, decaying: Tree, name: str = "weight_decay") -> _Parts:
    """Adds `weight_decay` times the parameter where it decays, or another setting times it."""
    if name not in hyper:
        return []

    def decay(updates: Tree, params: Tree) -> Tree:
        def one(does: Any, update: Any, param: Any) -> Any:
            if isinstance(does, bool):
                return update + hyper[name] * param if does else update
            return jnp.where(does, update + hyper[name] * param, update)

        return jax.tree.map(one, jax.tree.broadcast(decaying, updates), updates, params)

    return [optax.stateless(decay)]


def _is_zero(value: Any) -> bool:
    value = value.value if isinstance(value, constant) else value
    return value is None or (isinstance(value, int | float) and value == 0)


def _check(optimizer: Optimizer, given: dict[str, Any]) -> None:
    """Raises `RecipeError` unless each setting is a schedule, or a number in its range."""
    kind = optimizer._about()["optimizer"]
    optional = [name for name in ("adam_lr", "rms") if given.get(name) is not None]
    for name in (*_NOT_NEGATIVE, *_AVERAGES, *optional):
        schedule = as_schedule(given.get(name, 0), f"{kind}'s {name}")
        value = schedule.value if isinstance(schedule, constant) else 0.0
        if value < 0:
            raise invalid(
                "setting-below-zero",
                f"{kind}'s {name}",
                value,
                "a finite number of at least 0",
                name=name,
            )
        if name in _AVERAGES and value >= 1:
            raise invalid(
                "average-range",
                f"{kind}'s {name}",
                value,
                f"0 <= {name} < 1, such as 0.9",
                name=name,
            )
    if given.get("nesterov") and _is_zero(given["momentum"]):
        expected = "above 0, such as 0.9"
        raise invalid(
            "nesterov-without-momentum", "momentum with nesterov=True", given["momentum"], expected
        )
    if given.get("nesterov") and given.get("dampening"):
        expected = "0, as PyTorch's"
        raise invalid(
            "nesterov-with-dampening", "dampening with nesterov=True", given["dampening"], expected
        )
    if given["clip"] is not None:
        schedule = as_schedule(given["clip"], f"{kind}'s clip")
        if isinstance(schedule, constant) and schedule.value <= 0:
            raise invalid(
                "clip-not-above-zero",
                "clip",
                schedule.value,
                "a norm above 0, or None for no clipping",
            )
    decay = given.get("decay", "all")
    if decay not in ("all", "kernels") and not callable(decay):
        raise invalid(
            "decay-unknown", "decay", decay, "'all', 'kernels' or a function of (path, leaf)"
        )
