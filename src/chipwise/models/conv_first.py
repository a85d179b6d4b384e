"""A 2-D convolution with channels first, as PyTorch has it: the chip's operation, or on the CPU a
form that is faster than XLA's (`depthwise` where each channel has its own kernel, and
`conv_products`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import lax

from . import conv_products, depthwise
from .chip_traits import by_platform
from .depthwise import Pads, Pair

NCHW = ("NCHW", "OIHW", "NCHW")


def has_form(x: jax.Array, kernel: jax.Array, strides: Pair, pads: Pads, groups: int) -> bool:
    """Whether `conv_first` computes this convolution, and faster than XLA on the CPU."""
    if groups > 1:
        return kernel.shape[:2] == (groups, 1) and x.shape[1] == groups
    return conv_products.pay(x.shape[2:], kernel.shape[2:], strides, pads)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def conv_first(x: jax.Array, kernel: jax.Array, strides: Pair, pads: Pads) -> jax.Array:
    """Convolves `x` `(batch, channels, height, width)` with `kernel` `(out, channels, kh, kw)`, or
    each channel with its own, `(channels, 1, kh, kw)`. `pads` is ((low, high), (low, high)) in
    pixels, none below 0.

    Returns `(batch, out, out_height, out_width)` in the dtype of `x`. Reverse-mode gradients,
    `vmap` and `jit` work, forward mode (`jax.jvp`) does not.
    """
    on_cpu = partial(_form(x, kernel).forward, strides, pads)
    return by_platform(x, kernel, cpu=on_cpu, default=partial(_plain, strides, pads))


def _form(x: jax.Array, kernel: jax.Array) -> Any:
    return conv_products if x.shape[1] == kernel.shape[1] else depthwise


def _plain(strides: Pair, pads: Pads, x: jax.Array, kernel: jax.Array) -> jax.Array:
    groups = x.shape[1] // kernel.shape[1]
    return lax.conv_general_dilated(
        x, kernel, strides, pads, dimension_numbers=NCHW, feature_group_count=groups
    )


def _forward(x: jax.Array, kernel: jax.Array, strides: Pair, pads: Pads) -> Any:
    return conv_first(x, kernel, strides, pads), (x, kernel)


def _backward(strides: Pair, pads: Pads, residuals: Any, g: jax.Array) -> Any:
    # Two separate switches: a first layer's unused input gradient must stay removable as dead code
    x, kernel = residuals
    plain, form = partial(_plain, strides, pads), _form(x, kernel)
    dx = by_platform(
        *(x, kernel, g),
        cpu=partial(form.input_gradient, strides, pads),
        default=lambda x, k, g: jax.vjp(lambda x: plain(x, k), x)[1](g)[0],
    )
    dk = by_platform(
        *(x, kernel, g),
        cpu=partial(form.kernel_gradient, strides, pads),
        default=lambda x, k, g: jax.vjp(lambda k: plain(x, k), k)[1](g)[0],
    )
    return dx, dk


conv_first.defvjp(_forward, _backward)
