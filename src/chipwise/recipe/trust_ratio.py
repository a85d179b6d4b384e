"""Optimizers that scale each layer's step by a trust ratio, for large batches: LAMB and LARS.

    optimizer = lamb(lr=warmup(linear(4e-3), "28%"), weight_decay=0.01, decay="kernels", clip=1.0)

The ratio is that of two norms of the layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..base.annotations import as_annotated
from .optimizers import STACKED, Decay, Scalars, Tree, _clipped, _decayed, _Named, _Parts


class _ByLayer(_Named):
    """Optimizers with a ratio for each layer. Layers without decay have a ratio of 1."""

    stacked: str

    @property
    def elementwise(self) -> bool:
        return False

    def _by_ratios(
        self, decaying: Tree, ratio_of: Callable[[jax.Array, jax.Array], jax.Array], then: _Parts
    ) -> optax.GradientTransformation:
        """Multiplies the output of `then` for each layer's update by the layer's ratio, which is 1
        where a norm is 0. Elsewhere it is `ratio_of` the norms of the layer's parameters and of its
        update."""

        def norm(x: jax.Array, layers: int) -> jax.Array:
            return jnp.sqrt(
                jnp.sum(x * x, axis=tuple(range(int(layers > 1), x.ndim)), keepdims=True)
            )

        def one(
            does: bool, update: jax.Array, moved: jax.Array, param: jax.Array, layers: int
        ) -> jax.Array:
            own = norm(param, layers)
            other = norm(update, layers)
            usual = (own > 0) & (other > 0)
            ratio = jnp.where(usual, ratio_of(own, jnp.where(usual, other, 1)), 1)
            return moved * ratio if does else moved

        def update(updates: Tree, params: Tree) -> Tree:
            chain = optax.chain(optax.identity(), *then)
            structure = jax.tree.structure(params)
            moved, _ = chain.update(updates, chain.init(params), params)
            layers = jax.tree.unflatten(structure, self.layers(params))
            return jax.tree.map(one, decaying, updates, moved, params, layers)

        return optax.stateless(update)


@as_annotated
@dataclass(frozen=True)
class lamb(_ByLayer):
    """Adam with decoupled weight decay, each layer's step as long as its parameters (You et al.,
    2020, https://arxiv.org/abs/1904.00962).

        u = adam(grad) + weight_decay * p;  p = p - lr * (|p| / |u|) * u

    Arguments: `lr`, `b1`, `b2`, `eps`, `weight_decay` and `clip` as in `adamw`. `decay`: which
    parameters decay (see `decays`). The others, usually biases and normalization, also move without
    the ratio, as in the paper's program. `stacked`: a pattern of paths whose leaves have a layer in
    each row. Each row then has its own ratio.
    """

    lr: Any
    b1: Any = 0.9
    b2: Any = 0.999
    eps: float = 1e-6
    weight_decay: Any = 0.01
    decay: Decay = "all"
    clip: Any = None
    stacked: str = STACKED

    def _transform(self, hyper: Scalars, decaying: Tree, norm: Any) -> optax.GradientTransformation:
        adam = optax.scale_by_adam(hyper["b1"], hyper["b2"], self.eps)
        parts = [*_clipped(hyper, norm), adam, *_decayed(hyper, decaying)]
        ratios = self._by_ratios(decaying, operator.truediv, [])
        return optax.chain(*parts, ratios, optax.scale_by_learning_rate(hyper["lr"]))


@as_annotated
@dataclass(frozen=True)
class lars(_ByLayer):
    """SGD with momentum, each layer with its own rate (You et al., 2017,
    https://arxiv.org/abs/1708.03888).

        rate = lr * trust * |p| / (|grad| + weight_decay * |p| + eps)
        v = momentum * v + rate * (grad + weight_decay * p);  p = p - v

    Arguments: `lr`, `momentum`, `weight_decay` and `clip` as in `sgd`. `trust` and `eps`: numbers.
    `decay` and `stacked` as in `lamb`. Layers that do not decay have a rate of `lr`. `optax.lars`
    divides by `|grad + weight_decay * p|`.
    """

    lr: Any
    momentum: Any = 0.9
    weight_decay: Any = 0.0
    trust: float = 0.001
    eps: float = 0.0
    decay: Decay = "all"
    clip: Any = None
    stacked: str = STACKED

    def _transform(self, hyper: Scalars, decaying: Tree, norm: Any) -> optax.GradientTransformation:
        def ratio_of(param: jax.Array, grad: jax.Array) -> jax.Array:
            return self.trust * param / (grad + hyper.get("weight_decay", 0.0) * param + self.eps)

        ratios = self._by_ratios(decaying, ratio_of, _decayed(hyper, decaying))
        parts = [*_clipped(hyper, norm), ratios, optax.scale_by_learning_rate(hyper["lr"])]
        return optax.chain(
            *parts, *([optax.trace(hyper["momentum"])] if "momentum" in hyper else [])
        )
