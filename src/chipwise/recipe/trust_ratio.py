"""Optimizers that scale each layer's step by a trust ratio, for large batches: LAMB and LARS.

    optimizer = lamb(lr=warmup(linear(4e-3), "28%"), weight_decay=0.01, decay="kernels", clip=1.0)

The ratio is that of two norms of the layer. All else is elementwise, so these optimizers work on the flat
vector of parameters too, and their state may be sharded: the engine adds the squares of each layer
(`engine.layers`).
"""

from __future__ import annotations

import fnmatch
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .optimizers import Scalars, Tree, _clipped, _decayed, _Named, _optax_dtypes, _Parts

STACKED = "*stack/*"
"""Of paths whose leaves have a layer in each row, as in `models.transformer.Blocks`."""


class _ByLayer(_Named):
    """Two elementwise parts, `_before` and `_after` the ratios. A ratio is of the norm of a layer's
    parameters and that of what `_before` makes of its gradient. Layers without decay have a ratio of 1."""

    stacked: str

    @property
    def elementwise(self) -> bool:
        return False

    @property
    def by_layer(self) -> bool:
        return True

    @abstractmethod
    def _before(self, hyper: Scalars, decaying: Tree, norm: Any) -> _Parts: ...

    @abstractmethod
    def _after(self, hyper: Scalars, decaying: Tree, ratios: Tree) -> _Parts: ...

    @abstractmethod
    def _ratios(self, params: jax.Array, others: jax.Array, hyper: Scalars) -> jax.Array:
        """Of layers whose norms are not 0, from the norms of their parameters and of `measured`."""

    def layers(self, params: Tree) -> list[int]:
        """For each leaf of `params` the number of layers that it holds, one in each row if more than one."""
        paths, _ = jax.tree_util.tree_flatten_with_path(params)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
        return [
            int(np.shape(leaf)[0]) or 1
            if np.ndim(leaf) > 1 and fnmatch.fnmatchcase(name, self.stacked)
            else 1
            for name, (_, leaf) in zip(names, paths, strict=True)
        ]

    def ratios(self, params: jax.Array, others: jax.Array, hyper: Scalars) -> jax.Array:
        """The ratio of each layer, 1 where a norm is 0.

        *Arguments:* the norms of layers: of their parameters, and of what `measured` returns, of one shape.
        """
        usual = (params > 0) & (others > 0)
        hyper = {name: jnp.asarray(value).astype(params.dtype) for name, value in hyper.items()}
        return jnp.where(usual, self._ratios(params, jnp.where(usual, others, 1), hyper), 1)

    def measured(
        self, grads: Tree, opt_state: Tree, params: Tree, hyper: Scalars, *, decaying: Tree | None = None,
        norm: Any = None,
    ) -> tuple[Tree, Tree]:  # fmt: skip
        """`params`, and what becomes of the gradient before the ratios, of which both norms are needed.
        Arguments as of `update`."""
        grads, wide, scalars, decaying, norm = self._prepared(grads, params, hyper, decaying, norm)
        parts = self._before(scalars, decaying, norm)
        if not parts:
            return wide, grads
        with _optax_dtypes():
            return wide, optax.chain(*parts).update(grads, tuple(opt_state[: len(parts)]), wide)[0]

    def _apply(
        self, grads: Tree, opt_state: Tree, params: Tree, scalars: Scalars, decaying: Tree, norm: Any,
        members: Any, ratios: Tree | None = None,
    ) -> tuple[Tree, Tree]:  # fmt: skip
        if ratios is None:
            ratios = self._of_leaves(grads, opt_state, params, scalars, decaying, norm)
        parts = [*self._before(scalars, decaying, norm), *self._after(scalars, decaying, ratios)]
        updates, opt_state = optax.chain(*parts).update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def _of_leaves(
        self, grads: Tree, opt_state: Tree, params: Tree, hyper: Scalars, decaying: Tree, norm: Any
    ) -> Tree:
        """The ratios of a tree's leaves, each to be broadcast to its leaf."""
        both = self.measured(grads, opt_state, params, hyper, decaying=decaying, norm=norm)
        chosen, structure = jax.tree.leaves(self.decaying(params)), jax.tree.structure(params)

        def length(x: jax.Array, layers: int) -> jax.Array:
            first = 0 if layers == 1 else 1
            return jnp.sqrt(jnp.sum(x * x, axis=tuple(range(first, x.ndim)), keepdims=True))

        ratios = [
            self.ratios(length(a, layers), length(b, layers), hyper) if adapts else jnp.ones((), a.dtype)
            for a, b, layers, adapts in zip(
                *map(jax.tree.leaves, both), self.layers(params), chosen, strict=True
            )
        ]
        return jax.tree.unflatten(structure, ratios)

    def _transform(self, hyper: Scalars, decaying: Tree, norm: Any) -> optax.GradientTransformation:
        return optax.chain(*self._before(hyper, decaying, norm), *self._after(hyper, decaying, None))


@dataclass(frozen=True)
class lamb(_ByLayer):
    """Adam with decoupled weight decay, each layer's step as long as its parameters (You et al., 2020,
    https://arxiv.org/abs/1904.00962).

        u = adam(grad) + weight_decay * p;  p = p - lr * (|p| / |u|) * u

    Arguments: `lr`, `b1`, `b2`, `eps`, `weight_decay` and `clip` as in `adamw`; `decay`: which parameters
    decay (see `decays`). The others, as a rule biases and normalization, also move without the ratio, as in
    the paper's program. `stacked`: a pattern of paths whose leaves have a layer in each row. Each row then
    has its own ratio.
    """

    lr: Any
    b1: Any = 0.9
    b2: Any = 0.999
    eps: float = 1e-6
    weight_decay: Any = 0.01
    decay: Any = "all"
    clip: Any = None
    stacked: str = STACKED

    def _before(self, hyper: Scalars, decaying: Tree, norm: Any) -> _Parts:
        adam = optax.scale_by_adam(hyper["b1"], hyper["b2"], self.eps)
        return [*_clipped(hyper, norm), adam, *_decayed(hyper, decaying)]

    def _after(self, hyper: Scalars, decaying: Tree, ratios: Tree) -> _Parts:
        return [_times(ratios), optax.scale_by_learning_rate(hyper["lr"])]

    def _ratios(self, params: jax.Array, others: jax.Array, hyper: Scalars) -> jax.Array:
        return params / others


@dataclass(frozen=True)
class lars(_ByLayer):
    """SGD with momentum, each layer with a rate of its own (You et al., 2017, https://arxiv.org/abs/1708.03888).

        rate = lr * trust * |p| / (|grad| + weight_decay * |p| + eps)
        v = momentum * v + rate * (grad + weight_decay * p);  p = p - v

    Arguments: `lr`, `momentum`, `weight_decay` and `clip` as in `sgd`; `trust` and `eps`, numbers; `decay`
    and `stacked` as in `lamb`. Layers that do not decay have a rate of `lr`. `optax.lars` divides by `|grad +
    weight_decay * p|`.
    """

    lr: Any
    momentum: Any = 0.9
    weight_decay: Any = 0.0
    trust: float = 0.001
    eps: float = 0.0
    decay: Any = "all"
    clip: Any = None
    stacked: str = STACKED

    def _before(self, hyper: Scalars, decaying: Tree, norm: Any) -> _Parts:
        return _clipped(hyper, norm)

    def _after(self, hyper: Scalars, decaying: Tree, ratios: Tree) -> _Parts:
        parts = [*_decayed(hyper, decaying), _times(ratios), optax.scale_by_learning_rate(hyper["lr"])]
        return [*parts, optax.trace(hyper["momentum"])] if "momentum" in hyper else parts

    def _ratios(self, params: jax.Array, others: jax.Array, hyper: Scalars) -> jax.Array:
        return self.trust * params / (others + hyper.get("weight_decay", 0.0) * params + self.eps)


def _times(ratios: Tree) -> optax.GradientTransformation:
    """Multiplies each value by its ratio."""
    return optax.stateless(lambda updates, _: jax.tree.map(lambda u, r: u * r, updates, ratios))
