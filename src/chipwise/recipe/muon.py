"""Muon: momentum with orthogonalized matrices for the hidden layers, and AdamW for all else."""

from __future__ import annotations

import fnmatch
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import optax

from ..base.annotations import as_annotated
from .optimizers import HIGHEST_ADAM, STACKED, Decay, Scalars, Tree, _clipped, _decayed, _Named

OUTER = (
    *(
        "*[Ee]mbed*",
        "[Ee]mb",
        "[Ee]mb[./_0-9]*",
        "*[./_][Ee]mb",
        "*[./_][Ee]mb[./_0-9]*",
        "*wte*",
        "*wpe*",
    ),
    *("head[./]*", "*[./]head[./]*", "*lm_head[./]*", "*classifier*"),
)
"""Patterns for the paths of matrices at a net's ends, which turn words into vectors, or vectors
into words or classes. `emb` counts only as a whole word of a path, because `member` and `ensemble`
contain it."""


@as_annotated
@dataclass(frozen=True)
class muon(_Named):
    """Momentum orthogonalized by Newton-Schulz iterations (Jordan et al., 2024,
    https://kellerjordan.github.io/posts/muon), for matrices of hidden layers. AdamW updates all
    other parameters.

        u = orthogonal(momentum) * rms * sqrt(max(rows, columns))
        p = p - lr * (u + weight_decay * p)

    Arguments:

    - `lr`: the rate of both, unless AdamW has its own `adam_lr`.
    - `momentum` and `nesterov`: settings of Muon.
    - `b1`, `b2` and `eps`: settings of AdamW.
    - `weight_decay`, `decay` and `clip` as in `adamw`.
    - `rms`: the root of the mean square of an update. By default it is as large as AdamW's, so that
      AdamW's rate and decay fit (Liu et al., 2025, https://arxiv.org/abs/2502.16982). With
      `rms=None`, the factor is Jordan's `sqrt(max(1, columns / rows))`, for rates such as 0.02, and
      an `adam_lr`.
    - `adam_only`: patterns for the paths of matrices that get AdamW, by default embeddings and
      heads (`recipe.muon.OUTER`). Every array without exactly two axes gets it too.
      `chipwise check RECIPE --summary` shows what moves each parameter.
    - `stacked` as in `lamb`.

    The iterations are those of `optax.contrib.scale_by_muon`, in float32.
    """

    lr: Any
    adam_lr: Any = None
    momentum: Any = 0.95
    nesterov: bool = True
    b1: Any = 0.9
    b2: Any = 0.95
    eps: float = 1e-8
    rms: float | None = 0.2
    weight_decay: Any = 0.0
    decay: Decay = "all"
    clip: Any = None
    adam_only: tuple[str, ...] = OUTER
    stacked: str = STACKED

    usual_rates = (1e-6, HIGHEST_ADAM)
    rate_power = 0.5

    @property
    def elementwise(self) -> bool:
        return False

    def kinds(self, params: Tree) -> Tree:
        """The rule that updates each leaf, "muon" or "adam"."""

        def kind(path: Any, leaf: Any) -> str:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            outer = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.adam_only)
            return "muon" if leaf.ndim - self._is_stacked(path, leaf) == 2 and not outer else "adam"

        return jax.tree_util.tree_map_with_path(kind, params)

    def _transform(self, hyper: Scalars, decaying: Tree, norm: Any) -> optax.GradientTransformation:
        def axes(path: Any, leaf: Any) -> Any:
            first = int(self._is_stacked(path, leaf))
            return optax.contrib.MuonDimensionNumbers(first, first + 1)

        def scaled(path: Any, update: Any) -> Any:
            rows, columns = (update.shape[axis] for axis in axes(path, update))
            if self.rms is None:
                return update * math.sqrt(max(1, columns / rows))
            return update * self.rms * math.sqrt(max(rows, columns))

        def moved(updates: Tree, _: Tree) -> Tree:
            rates = {"muon": hyper["lr"], "adam": hyper.get("adam_lr", hyper["lr"])}
            return jax.tree.map(lambda kind, u: -rates[kind] * u, self.kinds(updates), updates)

        by_path = jax.tree_util.tree_map_with_path
        orthogonal = optax.contrib.scale_by_muon(
            beta=hyper.get("momentum", 0.0),
            nesterov=self.nesterov,
            weight_dimension_numbers=functools.partial(by_path, axes),
        )
        kinds = {
            "muon": optax.chain(
                orthogonal, optax.stateless(lambda updates, _: by_path(scaled, updates))
            ),
            "adam": optax.scale_by_adam(hyper["b1"], hyper["b2"], self.eps),
        }
        parts = [
            *_clipped(hyper, norm),
            optax.partition(kinds, self.kinds),
            *_decayed(hyper, decaying),
        ]
        return optax.chain(*parts, optax.stateless(moved))
