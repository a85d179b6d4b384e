"""Mixing the examples of a batch: mixup, for `Task.mix`.

Each is `(batch, key) -> batch` within one replica. Labels `(n,)` become probabilities
`(n, classes)` float32, which the losses accept. Probabilities do not change. An example is mixed
with the previous one in the batch, which is random because the epoch is shuffled. Pixels are
rounded to their type.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ..base.annotations import as_annotated
from .image import expect, grid, stored

Batch = dict[str, jax.Array]
Mix = Callable[[Batch, jax.Array], Batch]

_POINTS = 2**12  # of `grid`, from 0 to 1


@as_annotated
def mixup(classes: int, alpha: float = 0.2, *, each: bool = True) -> Mix:
    """Blends two images and their labels with weights `s` and `1 - s`. `s` is the larger of `b` and
    `1 - b` for `b` from Beta(`alpha`, `alpha`), so an example keeps at least half of its own
    weight.

    `each`: a weight for every example. `False`: one for the batch, as in big_vision and timm's
    default. `alpha=0` mixes nothing, and only converts labels to probabilities.

    Source: Zhang et al. (2018, arXiv:1710.09412). Raises `DataError` for an invalid `alpha` or
    `classes`, and for a batch without the columns `image` and `label`.
    """

    call = f"mixup(classes={classes}, alpha={alpha})"
    right = isinstance(classes, int) and classes > 0 and 0 <= alpha < float("inf")
    expect(right, call, "a number of classes above 0, and an alpha of at least 0")

    def mix(batch: Batch, key: jax.Array) -> Batch:
        images, labels = _columns(batch, classes, call)
        if not alpha:
            return {**batch, "label": labels}
        share = grid(_shares(key, alpha, len(images), each))
        share = jnp.maximum(share, 1 - share)
        own = share.reshape((-1,) + (1,) * (images.ndim - 1))
        pixels = own * images.astype(jnp.float32) + (1 - own) * _before(images).astype(jnp.float32)
        label = share[:, None] * labels + (1 - share)[:, None] * _before(labels)
        return {**batch, "image": stored(pixels, images.dtype), "label": label}

    return mix


def _columns(batch: Batch, classes: int, call: str) -> tuple[jax.Array, jax.Array]:
    """Images, and labels as probabilities. A label outside the classes becomes NaN, and so does its
    loss."""
    shapes = {name: jnp.shape(value) for name, value in batch.items()}
    right = "label" in batch and len(shapes.get("image", ())) in (3, 4)
    expect(right, call, f"columns 'image' (n, height, width, ...) and 'label', got {shapes}")
    images = jnp.asarray(batch["image"])
    labels = jnp.asarray(batch["label"])
    if jnp.issubdtype(labels.dtype, jnp.floating) and labels.shape == (len(images), classes):
        return images, labels.astype(jnp.float32)
    n = len(images)
    given = f"{labels.dtype} {labels.shape}"
    right = bool(jnp.issubdtype(labels.dtype, jnp.integer)) and labels.shape == (n,)
    expect(right, call, f"labels of integers ({n},) or probabilities ({n}, {classes}), got {given}")
    known = (labels >= 0) & (labels < classes)
    return images, jnp.where(
        known[:, None], jax.nn.one_hot(labels, classes, dtype=jnp.float32), jnp.nan
    )


def _before(rows: jax.Array) -> jax.Array:
    return jnp.roll(rows, 1, axis=0)


def _shares(key: jax.Array, alpha: float, n: int, each: bool) -> jax.Array:
    """Samples of Beta(`alpha`, `alpha`) on the points of `grid`, each with the probability of its
    rounding interval. `jax.random.beta` uses rejection sampling, in loops of unknown length, which
    compilers cannot time."""
    drawn = jax.random.uniform(key, (n if each else 1,), jnp.float32)
    if alpha == 1:
        return drawn
    from scipy.special import betainc

    edges = jnp.asarray(betainc(alpha, alpha, (np.arange(_POINTS) + 0.5) / _POINTS), jnp.float32)
    return jnp.sum(drawn[:, None] >= edges[None, :], axis=1, dtype=jnp.float32) / _POINTS
