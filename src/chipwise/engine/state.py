"""Everything a training run carries from one step to the next, and its fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..recipe.task import Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a checkpoint holds.

    *Fields:* `step` `()` int32, the steps done, which is also the position in the data;
    `params` and `optimizer` float32; `state` as the task made it; `ema` like `params`, or `None`;
    `sums`, a dict of `Sum`: the training metrics since they were last logged.
    """

    step: jax.Array
    params: Tree
    state: Tree
    optimizer: Tree
    ema: Tree
    sums: dict[str, Any]


def fingerprint(params: Tree) -> str:
    """SHA-256 of the parameters' bytes, leaf by leaf in JAX's tree order (dict keys sorted)."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return digest.hexdigest()


def count(params: Tree) -> int:
    """The number of parameters."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))
