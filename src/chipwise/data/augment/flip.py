"""Mirroring. Never a quarter turn: an image keeps its shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .image import Augment, Example, chance, image_of


def flip(p: float = 0.5) -> Augment:
    """Mirrors left and right with probability `p`."""
    chance(p, f"flip(p={p})")

    def augment(example: Example, key: jax.Array) -> Example:
        image = image_of(example, "flip")
        return {**example, "image": jnp.where(jax.random.bernoulli(key, p), image[:, ::-1], image)}

    return augment


def flip_up_down(p: float = 0.5) -> Augment:
    """Mirrors top and bottom with probability `p`."""
    chance(p, f"flip_up_down(p={p})")

    def augment(example: Example, key: jax.Array) -> Example:
        image = image_of(example, "flip_up_down")
        return {**example, "image": jnp.where(jax.random.bernoulli(key, p), image[::-1], image)}

    return augment
