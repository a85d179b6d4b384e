"""What losses and metrics are given: the dtype and the shape looked at before anything is computed.

Shapes are known while the loss is traced, so a mistake costs one line and no step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import RecipeError


def floats(values: Any, name: str, ndim: int | None = None) -> jax.Array:
    """`values` as float32, of `ndim` axes if that is given and of at least one.

    Raises `RecipeError` for integers and for other shapes.
    """
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise RecipeError(f"{name} are {values.dtype}: expected floats of any width")
    if values.ndim == 0 or (ndim is not None and values.ndim != ndim):
        expected = "(batch, classes)" if ndim == 2 else "(batch, ...)"
        raise RecipeError(f"{name} have shape {values.shape}: expected {expected}")
    return values.astype(jnp.float32)


def class_labels(labels: jax.Array, logits: jax.Array) -> jax.Array:
    """(b,) int32 labels that fit `logits` (b, k); a uint32 too large to fit turns negative, hence NaN.

    Raises `RecipeError` for other dtypes and shapes.
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer) or labels.shape != logits.shape[:1]:
        raise RecipeError(
            f"labels are {labels.dtype} of shape {labels.shape}: expected whole numbers of shape "
            f"{logits.shape[:1]}, or float probabilities of shape {logits.shape}, to go with the logits"
        )
    return labels.astype(jnp.int32)


def same_shape(values: Any, name: str, like: jax.Array, like_name: str) -> jax.Array:
    """`values` as float32. Raises `RecipeError` unless they have exactly the shape of `like`."""
    values = jnp.asarray(values)
    if values.shape != like.shape:
        raise RecipeError(f"{name} have shape {values.shape}: expected {like.shape}, that of the {like_name}")
    return values.astype(jnp.float32)
