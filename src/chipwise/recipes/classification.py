"""The task of the built-in image recipes: one label for each image."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ..data.datasets import Dataset
from ..recipe import losses
from ..recipe.task import Sum, Task


def classification(
    model: tuple[Callable, Callable],
    dataset: Dataset,
    normalise: Callable[[jax.Array], jax.Array],
    augment: Callable[[dict, jax.Array], dict] | None = None,
    smoothing: float = 0.0,
    mix: Callable[[dict, jax.Array], dict] | None = None,
) -> Task:
    """A task with softmax cross-entropy and accuracy.

    *Arguments:*

    - `model`: `(init, apply)` from `cw.nnx.functional`.
    - `normalise`: a function from stored images, `(batch, ...)` uint8, to float32 model inputs.
    - `augment`: a function that changes one stored example.
    - `smoothing`: label smoothing, only in training.
    - `mix`: a function that changes a replica's batch after `augment`.
    """
    init, apply = model

    def forward(params, state, images, key, train):
        compute = jax.tree.leaves(params)[0].dtype  # bfloat16 if the recipe says so
        images = normalise(images).astype(compute)
        logits, state = apply(params, state, images, key, train)
        return logits.astype(jnp.float32), state

    def loss(params, state, batch, key, train):
        logits, state = forward(params, state, batch["image"], key, train)
        values = losses.softmax_cross_entropy(
            logits, batch["label"], smoothing=smoothing if train else 0.0
        )
        return {
            "loss": Sum.of(values),
            "accuracy": Sum.of(losses.correct(logits, batch["label"])),
        }, state

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
        returns="logits",
        class_names=dataset.class_names,
    )


def by_channel(mean: Sequence[float], std: Sequence[float]) -> Callable[[jax.Array], jax.Array]:
    """A function that returns `(image - mean) / std` in float32. `mean` and `std` are per channel,
    in the units of the stored image."""
    m = jnp.asarray(mean, jnp.float32)
    s = jnp.asarray(std, jnp.float32)

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
