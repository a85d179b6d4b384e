"""Converts the optimizer of a Keras model to a recipe's optimizer with the same updates.

    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse")
    recipe = cw.Recipe(task=cw.keras.task(model, train=data), optimizer=cw.keras.optimizer(model))

Keras adds `epsilon` elsewhere than PyTorch, sums steps where PyTorch sums gradients, and decouples
`weight_decay`. So these are optimizers of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from ..base import RecipeError, invalid, unknown
from ..base.annotations import as_annotated
from ..recipe.adaptive import nadam
from ..recipe.by_value import by_value
from ..recipe.optimizers import Optimizer, Scalars, Tree, _clipped, _decayed, _Named, moments
from ..recipe.schedules import Schedule, is_number, tabulated
from .keras_library import keras_library

_Rule = list[optax.GradientTransformation]


def _sgd(lr: Any, momentum: float, nesterov: bool) -> _Rule:
    return [optax.scale(lr), *([optax.trace(momentum, nesterov)] if momentum else [])]


def _rmsprop(lr: Any, rho: float, momentum: float, epsilon: float, centered: bool) -> _Rule:
    scale = optax.scale_by_stddev if centered else optax.scale_by_rms
    return [scale(rho, epsilon), *_sgd(lr, momentum, False)]


def _adagrad(lr: Any, initial_accumulator_value: float, epsilon: float) -> _Rule:
    return [optax.scale_by_rss(initial_accumulator_value, epsilon), optax.scale(lr)]


def _adadelta(lr: Any, rho: float, epsilon: float) -> _Rule:
    return [optax.scale_by_adadelta(rho, epsilon), optax.scale(lr)]


def _adam(lr: Any, beta_1: float, beta_2: float, epsilon: float, amsgrad: bool) -> _Rule:
    def move(time, _, gradient, value, mean, squares, *most):
        mean, squares = moments({"b1": beta_1, "b2": beta_2}, gradient, mean, squares)
        most = tuple(jnp.maximum(one, squares) for one in most)
        rate = lr * jnp.sqrt(1 - beta_2**time) / (1 - beta_1**time)
        return rate * mean / (jnp.sqrt((*most, squares)[0]) + epsilon), mean, squares, *most

    return [by_value(move, (0.0,) * (3 if amsgrad else 2))]


def _adamax(lr: Any, beta_1: float, beta_2: float, epsilon: float) -> _Rule:
    def move(time, _, gradient, value, mean, most):
        mean = beta_1 * mean + (1 - beta_1) * gradient
        most = jnp.maximum(beta_2 * most, jnp.abs(gradient))
        return lr / (1 - beta_1**time) * mean / (most + epsilon), mean, most

    return [by_value(move, (0.0, 0.0))]


def _nadam(lr: Any, beta_1: float, beta_2: float, epsilon: float) -> _Rule:
    own = nadam(0.0, eps=epsilon, momentum_decay=1.0)
    return [*own._rule({"b1": beta_1, "b2": beta_2}), optax.scale(lr)]


def _lion(lr: Any, beta_1: float, beta_2: float) -> _Rule:
    return [optax.scale_by_lion(beta_1, beta_2), optax.scale(lr)]


_RULES: dict[str, Callable[..., _Rule]] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "RMSprop": _rmsprop,
    "Adagrad": _adagrad,
    "Adadelta": _adadelta,
    "Adamax": _adamax,
    "Nadam": _nadam,
    "Lion": _lion,
}
_REFUSED = (
    *("clipnorm", "clipvalue", "use_ema", "loss_scale_factor", "gradient_accumulation_steps"),
    *("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"),
)
"""Settings without a counterpart here."""


@dataclass(frozen=True)
class _OfKeras(_Named):
    """An optimizer by Keras' rule. `given`: its other settings by Keras' names."""

    kind: str
    lr: Any
    given: tuple[tuple[str, Any], ...]
    weight_decay: Any
    clip: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.given:
            if not (isinstance(value, bool) or is_number(value)):
                what = f"{self._about()['optimizer']}'s {name}"
                raise invalid("keras-setting-fixed", what, value, "a number, or True or False")

    @property
    def settings(self) -> dict[str, Any]:
        own = {"lr": self.lr, "weight_decay": self.weight_decay, "clip": self.clip}
        return own | dict(self.given)

    @property
    def hyper(self) -> dict[str, Schedule]:
        fixed = dict(self.given)
        return {name: one for name, one in super().hyper.items() if name not in fixed}

    def _with(self, settings: dict[str, Any]) -> Optimizer:
        own = {name: settings.pop(name, value) for name, value in self.given}
        return replace(self, given=tuple(own.items()), **settings)

    @property
    def elementwise(self) -> bool:
        return True

    def _about(self) -> dict[str, Any]:
        return {"optimizer": f"keras.{self.kind}"}

    def _transform(self, hyper: Scalars, decaying: Tree, norm: Any) -> optax.GradientTransformation:
        lr, decay = hyper["lr"], {}
        if "weight_decay" in hyper:
            decay["weight_decay"] = lr * hyper["weight_decay"]
        rule = _RULES[self.kind](lr, **dict(self.given))
        parts = [*_clipped(hyper, norm), *rule, *_decayed(decay, decaying)]
        return optax.chain(*parts, optax.scale(-1.0))


@as_annotated
def optimizer(optimizer: Any, *, length: int | None = None) -> Optimizer:
    """An optimizer for a recipe, with the updates of Keras' own.

    *Arguments:*

    - `optimizer`: a new optimizer of `keras.optimizers`, or a model that was compiled with one.
      `global_clipnorm` becomes `clip`.
    - `length`: the run's steps, if the learning rate is a schedule of Keras. It is called here for
      each of them, and becomes a table. In a longer run the last rate stays.

    Raises `RecipeError` for optimizers and settings that have no counterpart here.
    """
    keras = keras_library()
    given = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(given, keras.optimizers.Optimizer):
        expected = "an optimizer of keras.optimizers, or a compiled model"
        raise invalid("keras-no-optimizer", "optimizer", optimizer, expected)
    kind = type(given).__name__
    if kind not in _RULES or not type(given).__module__.startswith("keras."):
        about = "keras-optimizer-unknown", "optimizer of keras.optimizers"
        raise unknown(*about, kind, _RULES, instead="cw.from_optax")
    rate = given._learning_rate
    scheduled = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    names = [name.strip("_") for name in _REFUSED if getattr(given, name, None)]
    names = list(dict.fromkeys(name.removesuffix("_pattern") for name in names))
    if names := names + ["learning_rate=f"] * (callable(rate) and not scheduled):
        raise RecipeError("keras-optimizer-setting", kind=kind, names=names)
    if steps := int(given.iterations.value):
        raise RecipeError("keras-optimizer-used", kind=kind, steps=steps)
    if scheduled:
        if length is None or length < 1:
            expected = "the run's steps, such as 2000"
            raise invalid("keras-schedule-length", "length with a schedule", length, expected)
        rates = [np.float32(rate(step)) for step in range(length)]
        # As many digits as the step uses: they are stored with every run.
        lr: Any = tabulated([float(str(one)) for one in rates], "step")
    else:
        lr = float(str(np.float32(rate.value)))
    names = [name for name in inspect.signature(_RULES[kind]).parameters if name != "lr"]
    own = tuple((name, getattr(given, name)) for name in names)
    return _OfKeras(kind, lr, own, given.weight_decay or 0.0, given.global_clipnorm)
