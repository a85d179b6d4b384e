"""Several changes as one."""

from __future__ import annotations

import jax

from .image import Augment, Example


def compose(*stages: Augment) -> Augment:
    """One change after another; stage `i` draws from the key folded with `i`."""

    def augment(example: Example, key: jax.Array) -> Example:
        for number, stage in enumerate(stages):
            example = stage(example, jax.random.fold_in(key, number))
        return example

    return augment
