"""Further optimizers that move each value by itself, each as `torch.optim` defines it.

    optimizer = rmsprop(lr=cosine(1e-3), momentum=0.9, centered=True)

All but `asgd` and `rprop` also have a decay beside the gradient, `weight_decay`, as Keras has it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax.numpy as jnp
import optax

from ..base import invalid
from ..base.annotations import as_annotated
from .by_value import by_value
from .optimizers import HIGHEST_ADAM, Decay, Scalars, _Elementwise, _Parts, moments
from .schedules import Schedule

Rate = float | Schedule | Callable[[Any], Any]
"""A number, or one for each step: a schedule, or a function of the step."""


@dataclass(frozen=True)
class _Adaptive(_Elementwise):
    """L2 in the gradient, and a rule after it."""

    lr: Rate
    _: KW_ONLY
    l2: Rate = 0.0
    decay: Decay = "all"
    clip: Rate | None = None
    maximize: bool = False

    def _moving(self, hyper: Scalars, decay: _Parts) -> _Parts:
        return [*self._rule(hyper), *decay]

    @abstractmethod
    def _rule(self, hyper: Scalars) -> _Parts:
        """The transforms of the gradient, which has its `l2`."""


@dataclass(frozen=True)
class _Decoupled(_Adaptive):
    """The rates are multiples of `lr`, and so is a decay beside them."""

    _: KW_ONLY
    weight_decay: Rate = 0.0


class _OwnRate(_Adaptive):
    """The rule's result is the step."""

    def _stepping(self, hyper: Scalars) -> optax.GradientTransformation:
        return optax.scale(-1.0)


@as_annotated
@dataclass(frozen=True)
class adagrad(_Decoupled):
    """Adagrad, as `torch.optim.Adagrad` (Duchi et al., 2011).

        s = s + grad**2;  p = p - lr / (1 + (step - 1) * lr_decay) * grad / (sqrt(s) + eps)

    Arguments: `initial_accumulator_value`: the first `s`. The others as in `rmsprop`.
    """

    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def _rule(self, hyper: Scalars) -> _Parts:
        def move(time, _, gradient, value, squares):
            squares = squares + gradient * gradient
            rate = 1 + (time - 1) * self.lr_decay
            return gradient / (jnp.sqrt(squares) + self.eps) / rate, squares

        return [by_value(move, (self.initial_accumulator_value,))]


@as_annotated
@dataclass(frozen=True)
class adadelta(_Decoupled):
    """Adadelta, as `torch.optim.Adadelta` and `optax.adadelta` (Zeiler, 2012,
    https://arxiv.org/abs/1212.5701). Arguments: `rho`: the decay of both averages. The others as in
    `rmsprop`."""

    rho: float = 0.9
    eps: float = 1e-6

    def _rule(self, hyper: Scalars) -> _Parts:
        return [optax.scale_by_adadelta(self.rho, self.eps)]


@as_annotated
@dataclass(frozen=True)
class rmsprop(_Decoupled):
    """RMSprop, as `torch.optim.RMSprop` (Hinton, 2012), centered as in Graves (2013).

        s = rho * s + (1 - rho) * grad**2;  p = p - lr * grad / (sqrt(s) + eps)

    Arguments:

    - `lr` and `momentum`: a number or a schedule each.
    - `rho`: the decay of the average of squares: PyTorch's `alpha`.
    - `centered`: whether the square of the average gradient is subtracted from `s`.
    - `l2`: L2 in the gradient, before all else: PyTorch's `weight_decay`.
    - `weight_decay`: decoupled decay, as in `adamw`.
    - `decay`: which parameters have both (see `decays`). `clip` as in `sgd`.
    - `maximize`: whether the loss is maximized.
    """

    rho: float = 0.99
    eps: float = 1e-8
    momentum: Rate = 0.0
    centered: bool = False

    rate_power = 0.5

    def _rule(self, hyper: Scalars) -> _Parts:
        scale = optax.scale_by_stddev if self.centered else optax.scale_by_rms
        scaled = scale(self.rho, self.eps, eps_in_sqrt=False)
        return [scaled, *([optax.trace(hyper["momentum"])] if "momentum" in hyper else [])]


@dataclass(frozen=True)
class _Moments(_Decoupled):
    """A first and a second moment of the gradient."""

    b1: Rate = 0.9
    b2: Rate = 0.999
    eps: float = 1e-8

    usual_rates = (1e-6, HIGHEST_ADAM)
    rate_power = 0.5


@as_annotated
@dataclass(frozen=True)
class adamax(_Moments):
    """Adamax, as `torch.optim.Adamax` and `optax.adamax` (Kingma & Ba, 2015,
    https://arxiv.org/abs/1412.6980): Adam with the largest gradient, which fades by `b2`, in place
    of the second moment. Arguments as in `adam` and `rmsprop`."""

    def _rule(self, hyper: Scalars) -> _Parts:
        return [optax.scale_by_adamax(hyper["b1"], hyper["b2"], self.eps)]


@as_annotated
@dataclass(frozen=True)
class nadam(_Moments):
    """Adam with Nesterov's momentum, as `torch.optim.NAdam` (Dozat, 2016).

    The momentum of a step is `b1 * (1 - 0.96 ** (step * momentum_decay) / 2)`. The other arguments
    as in `adam` and `rmsprop`.
    """

    momentum_decay: float = 4e-3

    def _rule(self, hyper: Scalars) -> _Parts:
        b1, b2 = hyper["b1"], hyper["b2"]

        def momentum(time: Any) -> Any:
            return b1 * (1 - 0.5 * 0.96 ** (time * self.momentum_decay))

        def tick(time, product):
            return (product * momentum(time),)

        def move(time, totals, gradient, value, mean, squares):
            (product,), now, then = totals, momentum(time), momentum(time + 1)
            mean, squares = moments(hyper, gradient, mean, squares)
            ahead = (1 - now) / (1 - product) * gradient + then / (1 - product * then) * mean
            return ahead / (jnp.sqrt(squares / (1 - b2**time)) + self.eps), mean, squares

        return [by_value(move, (0.0, 0.0), tick, ((1.0, b1),))]


@as_annotated
@dataclass(frozen=True)
class radam(_Moments):
    """Adam with a rectified rate, as `torch.optim.RAdam` (Liu et al., 2020,
    https://arxiv.org/abs/1908.03265). Arguments as in `adam` and `rmsprop`."""

    def _rule(self, hyper: Scalars) -> _Parts:
        b1, b2 = hyper["b1"], hyper["b2"]

        # The weights of the second average, and these times their ages, as sums. The textbook's
        # differences of powers of b2 leave two digits of a float32.
        def tick(time, second, aged):
            second = 1 + b2 * second
            return second, second + b2 * aged

        def move(time, totals, gradient, value, mean, squares):
            second, aged = totals
            mean, squares = moments(hyper, gradient, mean, squares)
            limit, length = 2 / (1 - b2) - 1, 2 * aged / second - 1
            known = length > 5
            length = jnp.where(known, length, 6.0)
            part = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
            rate = jnp.sqrt(part * (1 - b2) * second) / (jnp.sqrt(squares) + self.eps)
            return mean / (1 - b1**time) * jnp.where(known, rate, 1.0), mean, squares

        return [by_value(move, (0.0, 0.0), tick, ((0.0, b2), (0.0, b2)))]


@as_annotated
@dataclass(frozen=True)
class asgd(_OwnRate):
    """Gradient descent with the falling rate of `torch.optim.ASGD` (Polyak & Juditsky, 1992).

        p = (1 - lambd * rate) * p - rate * grad;  rate = lr / (1 + lambd * lr * step) ** alpha

    The rate of a step follows from `lr` of the step before. The average of the parameters, which
    PyTorch begins after `t0` steps, is `Recipe(ema=...)` here. Arguments as in `rmsprop`.
    """

    lambd: float = 1e-4
    alpha: float = 0.75

    def _rule(self, hyper: Scalars) -> _Parts:
        lr = hyper["lr"]

        def tick(time, now, then):
            return jnp.where(time == 1, lr, then), lr / (1 + self.lambd * lr * time) ** self.alpha

        def move(time, totals, gradient, value):
            return (totals[0] * (gradient + self.lambd * value),)

        return [by_value(move, (), tick, ((0.0, lr), (0.0, lr)))]


@as_annotated
@dataclass(frozen=True)
class rprop(_OwnRate):
    """Resilient backpropagation, as `torch.optim.Rprop` (Riedmiller & Braun, 1993).

    Each value has a step of its own, which begins at `lr` of the first step. It is multiplied by
    `etas[1]` if the gradient keeps its sign, and by `etas[0]` if not, within `step_sizes`. It is
    meant for whole batches. A value is not updated while `lr` is 0, and then begins at the
    first that is above. The other arguments as in `rmsprop`.
    """

    etas: tuple[float, float] = (0.5, 1.2)
    step_sizes: tuple[float, float] = (1e-6, 50.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        down, up = self.etas
        if not 0 < down < 1 < up < math.inf:
            raise invalid("rprop-etas", "rprop's etas", self.etas, "0 < etas[0] < 1 < etas[1]")
        least, most = self.step_sizes
        if not 0 < least <= most < math.inf:
            expected = "0 < step_sizes[0] <= step_sizes[1]"
            raise invalid("rprop-step-sizes", "rprop's step_sizes", self.step_sizes, expected)

    def _rule(self, hyper: Scalars) -> _Parts:
        down, up = self.etas

        def move(time, _, gradient, value, before, step):
            turn = jnp.sign(gradient * before)
            factor = jnp.where(turn > 0, up, jnp.where(turn < 0, down, 1.0))
            after = jnp.where(step == 0, hyper["lr"], step) * factor
            step = jnp.where(hyper["lr"] > 0, jnp.clip(after, *self.step_sizes), 0.0)
            gradient = jnp.where(turn < 0, 0.0, gradient)
            return jnp.sign(gradient) * step, gradient, step

        return [by_value(move, (0.0, 0.0))]
