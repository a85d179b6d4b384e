"""Precision is part of the recipe: what a float32 product means differs from chip to chip.

By default TPUs multiply float32 matrices in one bfloat16 pass and recent GPUs in TF32. chipwise
asks for what the recipe says instead, on every chip:

| name   | parameters | products                                                    |
|--------|------------|-------------------------------------------------------------|
| `f32`  | float32    | float32 (on TPU: six bfloat16 passes)                        |
| `tf32` | float32    | TF32 on GPUs that have it, three bfloat16 passes on TPU      |
| `bf16` | float32    | parameters and inputs cast to bfloat16, accumulated in float32 |
| `f16`  | float32    | the same with float16, and a scaled loss; not on TPUs         |

Parameters, their gradients' sums, optimizer and state are float32 in every one. `f16` is for GPUs
before Ampere, which compute bfloat16 as float32. Its smallest numbers are 2^-24: the loss is
multiplied by a scale before it is differentiated, and the gradients divided by it (Micikevicius et
al. 2018, arXiv:1710.03740).
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from ..base import invalid, near, unknown

_PRODUCTS = {"f32": "highest", "tf32": "tensorfloat32", "bf16": "default", "f16": "default"}
_HALVES = {"bf16": jnp.bfloat16, "f16": jnp.float16}
TPU_PASSES = {"f32": 6, "tf32": 3, "bf16": 1, "f16": 1}
"""Multiplications in bfloat16 that a TPU makes for one product."""

_ONE_PASS: ContextVar[bool] = ContextVar("one_pass", default=False)


def check(precision: str) -> None:
    """Raises `RecipeError` for a precision that chipwise does not have."""
    if precision in _PRODUCTS:
        return
    aliases = {"float32": "f32", "fp32": "f32", "bfloat16": "bf16", "float16": "f16", "fp16": "f16"}
    close = aliases.get(precision) or near(str(precision), _PRODUCTS)
    raise unknown("precision-unknown", "precision", precision, _PRODUCTS, near=close)


def check_on(precision: str, platform: str) -> None:
    """Raises `RecipeError` for a precision that the platform does not have."""
    if precision == "f16" and platform == "tpu":
        raise invalid(
            "precision-f16-on-tpu", "precision on a TPU", precision, "bf16: it has no float16"
        )


def products(precision: str):
    """A context in which matrix products and convolutions are traced in this precision."""
    return jax.default_matmul_precision("default" if _ONE_PASS.get() else _PRODUCTS[precision])


@contextlib.contextmanager
def one_pass():
    """A context in which products are traced in a single pass. It is for plans, which count the
    passes themselves, because the TPU compiler takes minutes for a convolution of several
    passes."""
    token = _ONE_PASS.set(True)
    try:
        yield
    finally:
        _ONE_PASS.reset(token)


def cast(tree, precision: str):
    """Floating leaves of `tree` in the precision's compute type. Other leaves stay as they are."""
    if precision not in _HALVES:
        return tree

    def one(x):
        return x.astype(_HALVES[precision]) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, tree)


def cast_batch(batch: dict, precision: str, uncast: tuple[str, ...]) -> dict:
    """The columns of `batch`, cast, except `uncast`. Targets keep their digits, whether a value of
    1,234.5 or mixup's share of 0.3."""
    return {k: v if k in uncast else cast(v, precision) for k, v in batch.items()}
