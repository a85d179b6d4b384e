"""2-D convolution: the chip's own operation, or a faster implementation on the CPU.

On TPU and GPU `conv` lowers to `lax.conv_general_dilated` and its usual gradients. On the CPU some
of XLA's convolutions are slow. Measured on 2 cores of an AVX-512 Xeon, JAX 0.10.2, float32, medians
of 5: the input gradient of a 6x6 layer of stride 2 took 28.7 ms where PyTorch took 5.0. There
`conv` is written as matrix products (`chipwise.models.conv_cpu`) with hand-written gradients. 3x3
layers of many channels are not: the kernel gradient with 128 ran at 63 GFLOP/s where the forward
pass ran at 277 and PyTorch's gradient at 266.

The choice is made when the program is traced for a stated chip (`models.chip_traits`), otherwise
when it is lowered, by platform. So a program traced on a laptop and compiled for an absent TPU has
the plain convolution. (If no chip is stated, it is in a StableHLO `case` with one branch and a
constant index, which XLA inlines first.)
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from . import conv_cpu
from .chip_traits import by_platform
from .conv_cpu import NHWC


def conv(
    x: jax.Array,
    kernel: jax.Array,
    window_strides: Sequence[int] = (1, 1),
    padding: str | Sequence[tuple[int, int]] = "SAME",
    *,
    dimension_numbers=None,
    precision=None,
    **options,
) -> jax.Array:
    """Convolve `x` `(batch, height, width, in)` with `kernel` `(kh, kw, in, out)`.

    Takes the arguments of `lax.conv_general_dilated`, so it also serves as
    `nnx.Conv(..., conv_general_dilated=conv)`. Dilated, grouped, integer or differently laid out
    convolutions go to `lax` unchanged. Unlike `lax`, the default layout is NHWC / HWIO / NHWC.
    Reverse-mode gradients, `vmap`, `jit` and `shard_map` work. Forward mode (`jax.jvp`) does not.

    Returns `(batch, out_height, out_width, out)` in the dtype of `x`.
    """
    numbers = NHWC if dimension_numbers is None else dimension_numbers
    plain = (
        x.ndim == 4
        and _is_nhwc(numbers, x.ndim)
        and all(_usual(name, value, x.dtype) for name, value in options.items())
        and jnp.issubdtype(x.dtype, jnp.floating)
        and x.dtype == kernel.dtype
        and x.size > 0
    )
    if not plain:
        options |= {"dimension_numbers": numbers, "precision": precision}
        return lax.conv_general_dilated(x, kernel, window_strides, padding, **options)
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], window_strides, padding)
    pads = tuple((int(low), int(high)) for low, high in padding)
    return _conv(x, kernel, tuple(map(int, window_strides)), pads, precision)


def _usual(name: str, value, dtype) -> bool:
    """Whether an option of `lax.conv_general_dilated` changes nothing."""
    if name in ("lhs_dilation", "rhs_dilation"):
        return all(step == 1 for step in value or ())
    return value in ((1,) if name.endswith("_group_count") else (None, dtype))


def _is_nhwc(numbers, ndim: int) -> bool:
    want = lax.conv_dimension_numbers((1,) * ndim, (1,) * ndim, NHWC)
    return lax.conv_dimension_numbers((1,) * ndim, (1,) * ndim, numbers) == want


def _lax_conv(strides, pads, precision, x, kernel):
    return lax.conv_general_dilated(
        x, kernel, strides, pads, dimension_numbers=NHWC, precision=precision
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _conv(x, kernel, strides, pads, precision):
    return by_platform(
        x,
        kernel,
        cpu=partial(conv_cpu.forward, strides, pads),
        default=partial(_lax_conv, strides, pads, precision),
    )


def _forward(x, kernel, strides, pads, precision):
    return _conv(x, kernel, strides, pads, precision), (x, kernel)


def _backward(strides, pads, precision, residuals, g):
    # Two separate switches: a first layer's unused input gradient must stay removable as dead code.
    x, kernel = residuals
    plain = partial(_lax_conv, strides, pads, precision)

    def gradient(cpu, default):
        return by_platform(x, kernel, g, cpu=partial(cpu, strides, pads), default=default)

    dx = gradient(
        conv_cpu.input_gradient, lambda x, k, g: jax.vjp(lambda x: plain(x, k), x)[1](g)[0]
    )
    dk = gradient(
        conv_cpu.kernel_gradient, lambda x, k, g: jax.vjp(lambda k: plain(x, k), k)[1](g)[0]
    )
    return dx, dk


_conv.defvjp(_forward, _backward)
