"""A 2-D convolution with channels first, and its gradients, as matrix products, for XLA's CPU
backend.

They pay for 1x1 kernels, and for kernels that are larger than the images they move over, for which
XLA has slow loops. The gradient of the input moves over the output: the last layers of a ResNet
with small images have such ones. Measured on 2 cores of an AMD EPYC, JAX 0.10.2, float32, forward
pass, gradient of the input and of the kernel, milliseconds of a processor: 16 images of 2x2 with
512 channels and 3x3 kernels took 215, 214 and 3, here 2, 3 and 2. 4 images of 14x14 with 1x1
kernels from 1024 to 256 channels took 3.8, 2.9 and 9.3, here 2.7, 2.6 and 2.8. Larger images lose
by them: 16 of 16x16 with 64 channels and 3x3 kernels took 2.2 and 1.7, here 3.7 and 2.9 (forward
and input).

`x` is `(B, C, H, W)`, `kernel` `(O, C, kh, kw)`, `g` `(B, O, H', W')`. Sums run in float32 or
wider.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from . import wide
from .depthwise import Pads, Pair, padded, seen, sizes

_MOST = 49
"""Positions in a kernel up to which products pay: each is several operations to compile."""


def pay(image: tuple[int, ...], taps: tuple[int, ...], strides: Pair, pads: Pads) -> bool:
    """Whether products are faster for `taps` (kernel height, width) over `image`."""
    out = sizes(image, taps, strides, pads)
    small = all(k > min(both) for k, *both in zip(taps, image, out, strict=True))
    return math.prod(taps) == 1 or (small and math.prod(taps) <= _MOST)


def forward(strides: Pair, pads: Pads, x: Array, kernel: Array) -> Array:
    """The kernel times what its positions see."""
    out = sizes(x.shape[2:], kernel.shape[2:], strides, pads)
    patches = _patches(x, kernel, out, strides, pads)
    flat = kernel.astype(patches.dtype).reshape(*kernel.shape[:2], -1)
    return jnp.tensordot(flat, patches, 2).swapaxes(0, 1).astype(x.dtype)


def input_gradient(strides: Pair, pads: Pads, x: Array, kernel: Array, g: Array) -> Array:
    """`g` times all of the kernel, added up where its positions see the input."""
    dtype = wide(x.dtype)
    parts = jnp.tensordot(g.astype(dtype), kernel.astype(dtype).transpose(0, 2, 3, 1), ((1,), (0,)))
    spans = list(zip(x.shape[2:], g.shape[2:], pads, strides, strict=True))
    total: Any = 0
    for at in itertools.product(*map(range, kernel.shape[2:])):
        places = [
            (i - low, n + low - i - (o - 1) * s - 1, s - 1)
            for i, (n, o, (low, _), s) in zip(at, spans, strict=True)
        ]
        part = parts[:, :, :, *at]
        total = total + lax.pad(part, jnp.zeros((), dtype), [(0, 0, 0), *places, (0, 0, 0)])
    return total.transpose(0, 3, 1, 2).astype(x.dtype)


def kernel_gradient(strides: Pair, pads: Pads, x: Array, kernel: Array, g: Array) -> Array:
    """`g` times what the positions of the kernel see."""
    patches = _patches(x, kernel, g.shape[2:], strides, pads)
    sums = jnp.tensordot(g.astype(patches.dtype), patches, ((0, 2, 3), (2, 3, 4)))
    return sums.reshape(kernel.shape).astype(kernel.dtype)


def _patches(x: Array, kernel: Array, out: tuple[int, ...], strides: Pair, pads: Pads) -> Array:
    """The pixels that each position of the kernel sees, `(C, positions, B, H', W')`."""
    x = padded(x.astype(wide(x.dtype)).swapaxes(0, 1), pads)
    return jnp.stack([pixels for _, pixels in seen(x, kernel.shape[2:], out, strides)], 1)
