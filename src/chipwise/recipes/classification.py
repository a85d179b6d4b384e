"""The task of the built-in image recipes: one label for each image."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ..data.datasets import Dataset
from ..recipe import losses
from ..recipe.source import Source
from ..recipe.task import Sum, Task

View = tuple[float, Callable[[jax.Array], jax.Array]]
"""A share of the logits, and what it makes of normalised images `(batch, h, w, c)`."""


def classification(
    model: tuple[Callable, Callable], dataset: Dataset, normalise: Callable[[jax.Array], jax.Array],
    augment: Callable[[dict, jax.Array], dict] | None = None, smoothing: float = 0.0,
    mix: Callable[[dict, jax.Array], dict] | None = None, views: Sequence[View] | None = None,
    from_data: Callable[[Source], dict] | None = None,
) -> Task:  # fmt: skip
    """A task with softmax cross-entropy and accuracy.

    *Arguments:* `model`: `(init, apply)` from `cw.nnx.functional`; `normalise`: stored images, `(batch, ...)`
    uint8, to float32 model inputs; `augment`: of one stored example; `smoothing`: label smoothing, only in
    training; `mix`: of a replica's batch after `augment`; `views`: of normalised images, for which evaluation
    computes a weighted sum of the logits; `from_data`: as in `Task`.
    """
    init, apply = model

    def forward(params, state, images, key, train):
        compute = jax.tree.leaves(params)[0].dtype  # bfloat16 if the recipe says so
        images = normalise(images).astype(compute)
        if train or views is None:
            logits, state = apply(params, state, images, key, train)
            return logits.astype(jnp.float32), state
        seen = jnp.concatenate([view(images) for _, view in views])
        logits, state = apply(params, state, seen, key, train)
        each = logits.astype(jnp.float32).reshape(len(views), len(images), -1)
        return jnp.tensordot(jnp.asarray([weight for weight, _ in views], jnp.float32), each, 1), state

    def loss(params, state, batch, key, train):
        logits, state = forward(params, state, batch["image"], key, train)
        values = losses.softmax_cross_entropy(logits, batch["label"], smoothing=smoothing if train else 0.0)
        return {"loss": Sum.of(values), "accuracy": Sum.of(losses.correct(logits, batch["label"]))}, state

    def predict(params, state, inputs):
        return forward(params, state, inputs["image"], None, False)[0]

    return Task(
        init=init,
        loss=loss,
        train=dataset.train,
        eval=dataset.eval,
        augment=augment,
        mix=mix,
        classes=dataset.classes,
        predict=predict,
        from_data=from_data,
        class_names=dataset.class_names,
    )


def mirror_and_shifts(pixels: int = 1) -> list[View]:
    """Six views: the image with weight 1/2, and shifted by `pixels` up and left, and down and right, with 1/4
    each; all of them also mirrored. Edges are reflected (airbench's level 2)."""

    def moved(images: jax.Array, by: int) -> jax.Array:
        pad, (h, w) = abs(by), images.shape[1:3]
        wide = jnp.pad(images, [(0, 0), (pad, pad), (pad, pad), (0, 0)], mode="reflect")
        return wide[:, pad + by : pad + by + h, pad + by : pad + by + w]

    def view(by: int, mirror: bool) -> Callable[[jax.Array], jax.Array]:
        return lambda images: moved(images[:, :, ::-1] if mirror else images, by)

    shares = {0: 0.25, pixels: 0.125, -pixels: 0.125}
    return [(share, view(by, mirror)) for by, share in shares.items() for mirror in (False, True)]


def by_channel(mean: Sequence[float], std: Sequence[float]) -> Callable[[jax.Array], jax.Array]:
    """`(image - mean) / std` in float32; `mean` and `std` per channel, in the units of the stored image."""
    m, s = jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32)

    def normalise(images):
        pad = (1,) * (images.ndim - 1)
        return (images.astype(jnp.float32) - m.reshape(*pad, -1)) / s.reshape(*pad, -1)

    return normalise


def by_image(images: jax.Array) -> jax.Array:
    """Standardises each image `(h, w, c)` of the batch to mean 0 and deviation 1 (TensorFlow's
    `per_image_standardization`: the deviation is at least `1 / sqrt(h * w * c)`)."""
    images = images.astype(jnp.float32)
    axes = tuple(range(1, images.ndim))
    mean = jnp.mean(images, axis=axes, keepdims=True)
    least = jnp.float32(images[0].size ** -0.5)
    return (images - mean) / jnp.maximum(jnp.std(images, axis=axes, keepdims=True), least)
