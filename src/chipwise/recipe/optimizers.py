"""The optimizers to write in a recipe: values that print as they are typed.

    optimizer = sgd(lr=one_cycle(0.4, warmup="5ep"), momentum=0.9, nesterov=True, weight_decay=5e-4)

The mathematics is optax's; each function names its PyTorch equivalent. It runs in float32 (or wider, if a
parameter is), and parameters keep their dtype.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from ..errors import RecipeError, near
from .optimizer import Optimizer, Scalars, Tree
from .schedule import Schedule, as_schedule, callable_name, constant

_Parts = list[optax.GradientTransformation]

_INPUTS = ("lr", "b1", "b2")
_AVERAGES = ("momentum", "b1", "b2")
_OPTIONAL = ("momentum", "weight_decay", "clip")
"""Settings that are inputs of the step, these only where they are not None or exactly 0."""

HIGHEST_ADAM = 0.03
"""Adam's rate from which few nets train: every weight may move by this much a step. A rule of thumb."""


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
        return {name: as_schedule(given[name], name) for name in used}

    def _with(self, settings: dict[str, Any]) -> Optimizer:
        return replace(self, **settings)  # type: ignore[type-var]

    def _about(self) -> dict[str, Any]:
        return {"optimizer": type(self).__name__}


class _Elementwise(_Named):
    """Clip, move, and take a step of `lr`."""

    @property
    def elementwise(self) -> bool:
        return True

    def _transform(self, hyper: Scalars, decaying: Tree, norm: Any) -> optax.GradientTransformation:
        moving = self._moving(hyper, _decayed(hyper, decaying))
        return optax.chain(*_clipped(hyper, norm), *moving, optax.scale_by_learning_rate(hyper["lr"]))

    @abstractmethod
    def _moving(self, hyper: Scalars, decay: _Parts) -> _Parts:
        """What becomes of the clipped gradient, with `decay` where it belongs."""


@dataclass(frozen=True)
class sgd(_Elementwise):
    """Stochastic gradient descent with momentum and coupled L2 decay, as `torch.optim.SGD`.

        g = grad + weight_decay * p;  v = momentum * v + g
        p = p - lr * (g + momentum * v if nesterov else v)

    Arguments: `lr`, `momentum` and `weight_decay`, each a number or a schedule;
    `decay`, which parameters decay (see `decays`); `clip`, the largest global
    norm of the gradient, a number, a schedule or None. Clipping comes before
    the decay is added. A `momentum` of exactly 0 keeps no velocity, and a
    `weight_decay` of exactly 0 adds nothing; neither is then an input.

    The DavidNet code sums its loss and passes `lr / batch` and
    `weight_decay * batch`; on the mean gradient that is this rule with the
    undivided numbers.
    """

    lr: Any
    momentum: Any = 0.9
    nesterov: bool = False
    weight_decay: Any = 0.0
    decay: Any = "all"
    clip: Any = None

    usual_rates: ClassVar[tuple[float, float] | None] = (1e-3, 3.0)
    rate_power: ClassVar[float | None] = 1.0

    def _moving(self, hyper: Scalars, decay: _Parts) -> _Parts:
        if "momentum" not in hyper:
            return decay
        return [*decay, optax.trace(hyper["momentum"], nesterov=self.nesterov)]


class _Adam(_Elementwise):
    """Adam's moments, and the decay outside of them."""

    eps: float

    usual_rates: ClassVar[tuple[float, float] | None] = (1e-6, HIGHEST_ADAM)
    rate_power: ClassVar[float | None] = 0.5

    def _moving(self, hyper: Scalars, decay: _Parts) -> _Parts:
        return [optax.scale_by_adam(hyper["b1"], hyper["b2"], self.eps), *decay]


@dataclass(frozen=True)
class adam(_Adam):
    """Adam, as `torch.optim.Adam` (Kingma & Ba, 2015, https://arxiv.org/abs/1412.6980).

    Arguments: `lr`, `b1` and `b2`, each a number or a schedule; `eps`, a number,
    added after the square root; `clip` as in `sgd`. It has no weight decay:
    that is `adamw`, because L2 in the gradient of Adam is not a decay.
    """

    lr: Any
    b1: Any = 0.9
    b2: Any = 0.999
    eps: float = 1e-8
    clip: Any = None


@dataclass(frozen=True)
class adamw(_Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`.

    Each decaying parameter also shrinks by `lr * weight_decay` of itself a step,
    outside the moments (Loshchilov & Hutter, 2019,
    https://arxiv.org/abs/1711.05101; like PyTorch and optax, and unlike the
    paper, the decay is multiplied by the learning rate). Arguments as in
    `adam`, and `weight_decay` (a number or a schedule) and `decay` as in `sgd`.
    """

    lr: Any
    b1: Any = 0.9
    b2: Any = 0.999
    eps: float = 1e-8
    weight_decay: Any = 0.01
    decay: Any = "all"
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
        about: dict[str, Any] = {"optimizer": "from_optax", "make": callable_name(self.make)}
        return about | ({"elementwise": True} if self.elementwise else {})

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.given)
        cut = ", elementwise=True" if self.elementwise else ""
        return f"from_optax({callable_name(self.make)}{cut}{given})"

    def _transform(self, hyper: Scalars, decaying: Tree, norm: Any) -> optax.GradientTransformation:
        return self.make(**hyper)


def from_optax(
    make: Callable[..., optax.GradientTransformation], *, elementwise: bool = False, **hyper: Any
) -> Optimizer:
    """Any optax optimizer, such as `from_optax(optax.lion, learning_rate=cosine(1e-4), b1=0.9)`.

    `make` is called with the keywords of `hyper`, each a number or a schedule, every one of which becomes an
    input of the step. Settings that are not numbers that vary, such as flags, masks and starting values, go
    in beforehand: `from_optax(functools.partial(optax.lion, mask=mask), learning_rate=0.01)`.
    `elementwise=True` says of `make` what `Optimizer.elementwise` means: true of Lion or RMSprop, not of
    Adafactor or Muon, which need whole parameters (as optax's LAMB and LARS: `cw.recipe.lamb`,
    `cw.recipe.lars` do not). `make` must not branch on the numbers. A scheduled one is NaN in `init`, where
    it has no step, so that a state made from it cannot pass unseen.

    Raises `RecipeError` for a value that is neither a number nor a schedule.
    """
    if not callable(make) or not hyper:
        raise RecipeError("optax-maker-expected", make=repr(make))
    for name, value in hyper.items():
        if isinstance(value, bool | str | None):
            raise RecipeError("optax-setting-fixed", make=callable_name(make), name=name, value=repr(value))
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


def _decayed(hyper: Scalars, decaying: Tree) -> _Parts:
    """Adds `weight_decay` times the parameter where it decays."""
    if "weight_decay" not in hyper:
        return []

    def decay(updates: Tree, params: Tree) -> Tree:
        def one(does: Any, update: Any, param: Any) -> Any:
            if isinstance(does, bool):
                return update + hyper["weight_decay"] * param if does else update
            return jnp.where(does, update + hyper["weight_decay"] * param, update)

        return jax.tree.map(one, decaying, updates, params)

    return [optax.stateless(decay)]


def _is_zero(value: Any) -> bool:
    value = value.value if isinstance(value, constant) else value
    return value is None or (isinstance(value, int | float) and value == 0)


def _check(optimizer: Optimizer, given: dict[str, Any]) -> None:
    """Raises `RecipeError` unless each setting is a schedule, or a number in its range."""
    kind = type(optimizer).__name__
    for name in ("lr", "eps", "weight_decay", "trust", *_AVERAGES):
        schedule = as_schedule(given.get(name, 0), f"{kind}'s {name}")
        value = schedule.value if isinstance(schedule, constant) else 0.0
        if value < 0:
            raise RecipeError("setting-below-zero", optimizer=kind, name=name, value=value)
        if name in _AVERAGES and value >= 1:
            raise RecipeError("average-range", optimizer=kind, name=name, value=value)
    if given.get("nesterov") and _is_zero(given["momentum"]):
        raise RecipeError("nesterov-without-momentum")
    if given["clip"] is not None:
        schedule = as_schedule(given["clip"], f"{kind}'s clip")
        if isinstance(schedule, constant) and schedule.value <= 0:
            raise RecipeError("clip-not-above-zero", clip=schedule.value)
    decay = given.get("decay", "all")
    if decay not in ("all", "kernels") and not callable(decay):
        raise RecipeError("decay-unknown", decay=repr(decay), near=near(str(decay), ("all", "kernels")))
