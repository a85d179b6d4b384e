"""Convolution as matrix products, for XLA's CPU backend.

XLA's CPU convolutions reach the speed of its matrix product in the forward pass, except for some
shapes, and mostly not in the backward pass. The forward pass and the two gradients here use the
form that was fastest for the shape (`forward_form` and the two functions after it), or XLA's
convolution ("lax"):

blocks    few channels: a matrix product 6 or 12 columns wide wastes a 16-lane vector unit.
          t x t neighbouring outputs become one output with t*t times the channels, and the input is
          cut into blocks such that every kernel becomes a 2x2 kernel of stride 1 over blocks.
rows      the kernel gradient of 1x1 kernels: the patches are the input itself, one product.

`x` is `(B, H, W, C)`, `k` `(kh, kw, C, O)`, `g` and the result `(B, H', W', O)`. `strides` is
(down, across), and `pads` is ((low, high), (low, high)) in pixels. Sums run in float32 or wider.
"""

import jax.numpy as jnp
from jax import lax

from . import wide

NHWC = ("NHWC", "HWIO", "NHWC")

#: Output channels above which a product's columns fill the vector units.
_WIDE = 64
#: Rows summed at once, since Eigen would choose by the number of threads.
_ROWS = 64


def forward_form(strides, kernel_shape) -> str:
    """Form of the forward pass."""
    kh, kw, c, o = kernel_shape
    return (
        "blocks" if kh * kw * c <= 32 and o < _WIDE and _overlaps(strides, kernel_shape) else "lax"
    )


def input_form(strides, kernel_shape) -> str:
    """Form of the gradient with respect to the input."""
    kh, kw, c, o = kernel_shape
    # XLA dilates g by the stride and multiplies the zeros too: 6x slower at 6x6 stride 2, 3x at 3x3
    # with 16 channels; with 128 no slower.
    small = kh * kw * c <= 32 or (strides[0] > 1 and c < 32)
    return "blocks" if small and o < _WIDE and _overlaps(strides, kernel_shape) else "lax"


def kernel_form(strides, kernel_shape) -> str:
    """Form of the gradient with respect to the kernel."""
    # XLA's convolution took 4x the time of the product.
    return "rows" if kernel_shape[:2] == (1, 1) and max(kernel_shape[2:]) >= _WIDE else "lax"


def _overlaps(strides, kernel_shape) -> bool:
    return kernel_shape[0] > strides[0] and kernel_shape[1] > strides[1]


def forward(strides, pads, x, k):
    """The convolution itself, in the dtype of `x`."""
    run = _blocks_forward if forward_form(strides, k.shape) == "blocks" else _lax_conv
    return run(strides, pads, *_widen(x, k)).astype(x.dtype)


def input_gradient(strides, pads, x, k, g):
    """Gradient with respect to `x`, in its dtype."""
    blocks = input_form(strides, k.shape) == "blocks"
    run = _blocks_input_gradient if blocks else _lax_input_gradient
    return run(strides, pads, *_widen(x, k, g)).astype(x.dtype)


def kernel_gradient(strides, pads, x, k, g):
    """Gradient with respect to `k`, in its dtype."""
    run = _rows_kernel_gradient if kernel_form(strides, k.shape) == "rows" else _lax_kernel_gradient
    return run(strides, pads, *_widen(x, k, g)).astype(k.dtype)


def _widen(*arrays):
    dtype = wide(arrays[0].dtype)
    return [a.astype(dtype) for a in arrays]


def _lax_conv(strides, pads, x, k):
    return lax.conv_general_dilated(x, k, strides, pads, dimension_numbers=NHWC)


# JAX's own gradients, transposed to NHWC explicitly: XLA's CPU compiler does that only outside of
# loops, and inside one uses code that is 40 times slower (JAX 0.10.2).


def _lax_input_gradient(strides, pads, x, k, g):
    sides = zip(pads, strides, k.shape[:2], x.shape[1:3], g.shape[1:3], strict=True)
    spread = [(kk - 1 - low, n + low - (o - 1) * s - 1) for (low, _), s, kk, n, o in sides]
    turned = k[::-1, ::-1].swapaxes(2, 3)
    return lax.conv_general_dilated(
        g, turned, (1, 1), spread, lhs_dilation=strides, dimension_numbers=NHWC
    )


def _lax_kernel_gradient(strides, pads, x, k, g):
    sides = zip(pads, strides, k.shape[:2], x.shape[1:3], g.shape[1:3], strict=True)
    seen = [(low, (o - 1) * s + kk - n - low) for (low, _), s, kk, n, o in sides]
    x = x.transpose(3, 1, 2, 0)
    g = g.transpose(1, 2, 0, 3)
    dk = lax.conv_general_dilated(x, g, (1, 1), seen, rhs_dilation=strides, dimension_numbers=NHWC)
    return dk.transpose(1, 2, 0, 3)


def _pad_to(x, lows, sizes):
    """Pad or crop the two middle axes: `lows` zeros in front, `sizes` in all."""
    config = [
        (low, size - low - n, 0) for low, size, n in zip(lows, sizes, x.shape[1:3], strict=True)
    ]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *config, (0, 0, 0)])


def _rows_product(a, g):
    """`a (..., K)`, `g (..., O)` summed over all leading axes -> `(K, O)`.

    Eigen may split a long sum over its threads. JAX has as many threads as cores or simulated
    devices, whichever are more, so the bits would depend on the number of devices (by 5e-6 at 6272
    rows and a 16x24 result). This happened up to 128x128 on 1, 2, 4 and 8 devices, for sums of 256
    terms or more. So such products are summed 64 rows at a time, in a fixed order, at the same
    speed.
    """
    a = a.reshape(-1, a.shape[-1])
    g = g.reshape(-1, g.shape[-1])
    rows = a.shape[0]
    if a.shape[1] * g.shape[1] >= 256 * 128 or rows <= _ROWS:
        return lax.dot_general(g, a, (((0,), (0,)), ((), ()))).T
    whole = rows // _ROWS * _ROWS
    parts = [z[:whole].reshape(-1, _ROWS, z.shape[1]) for z in (g, a)]
    y = lax.dot_general(parts[0], parts[1], (((1,), (1,)), ((0,), (0,)))).sum(0)
    if rows > whole:
        y = y + lax.dot_general(g[whole:], a[whole:], (((0,), (0,)), ((), ())))
    return y.T


def _rows_kernel_gradient(strides, pads, x, k, g):
    """The pixels that a 1x1 kernel sees, times `g`."""
    (sh, sw), (oh, ow) = strides, g.shape[1:3]
    x = _pad_to(x, (pads[0][0], pads[1][0]), ((oh - 1) * sh + 1, (ow - 1) * sw + 1))
    return _rows_product(x[:, ::sh, ::sw], g).reshape(k.shape)


# blocks ---------------------------------------------------------------------------------------


class _Blocks:
    """The geometry of a convolution as a 2x2 convolution over blocks."""

    def __init__(self, strides, pads, x_shape, k_shape):
        self.k_shape = k_shape
        self.strides = strides
        self.low = (pads[0][0], pads[1][0])
        size = [n + sum(p) for n, p in zip(x_shape[1:3], pads, strict=True)]
        # Smallest t for which (t-1)*s + k, the pixels that t outputs see, fit in two blocks of t*s.
        self.t = [-(-k // s) - 1 for k, s in zip(k_shape[:2], strides, strict=True)]
        while (
            k_shape[0] * k_shape[1] * k_shape[2] <= 32
            and self.t[0] * self.t[1] * k_shape[3] < _WIDE
        ):
            self.t = [t + 1 for t in self.t]
        self.block = [t * s for t, s in zip(self.t, strides, strict=True)]
        self.out = [(n - k) // s + 1 for n, k, s in zip(size, k_shape[:2], strides, strict=True)]
        self.n = [-(-o // t) for o, t in zip(self.out, self.t, strict=True)]
        self.padded = [(n + 1) * b for n, b in zip(self.n, self.block, strict=True)]

    def cut(self, x):
        """`(B, H, W, C)` -> `(B, n+1, n+1, block*block*C)`."""
        return _space_to_depth(_pad_to(x, self.low, self.padded), self.block)

    def cut_output(self, g):
        """`(B, H', W', O)` -> `(B, n, n, t*t*O)`."""
        size = [n * t for n, t in zip(self.n, self.t, strict=True)]
        return _space_to_depth(_pad_to(g, (0, 0), size), self.t)

    def patches(self, x):
        """`(B, n, n, 4*block*block*C)`: the two by two blocks that each group of outputs sees."""
        b, (nh, nw) = self.cut(x), self.n
        parts = [b[:, i : i + nh, j : j + nw] for i in (0, 1) for j in (0, 1)]
        return jnp.stack(parts, 3).reshape(*parts[0].shape[:3], -1)

    def kernel(self, k):
        """The kernel over blocks `(2, 2, block*block*C, t*t*O)`: linear in `k`, mostly zeros."""
        (c, o), (th, tw), (bh, bw), (sh, sw) = self.k_shape[2:], self.t, self.block, self.strides
        k = jnp.stack([_shift(k, 0, i * sh, 2 * bh) for i in range(th)], 3)
        k = jnp.stack([_shift(k, 1, j * sw, 2 * bw) for j in range(tw)], 4)
        k = k.reshape(2, bh, 2, bw, c, th * tw * o).transpose(0, 2, 1, 3, 4, 5)
        return k.reshape(2, 2, bh * bw * c, th * tw * o)


def _shift(k, axis, offset, size):
    config = [(0, 0, 0)] * k.ndim
    config[axis] = (offset, size - offset - k.shape[axis], 0)
    return lax.pad(k, jnp.zeros((), k.dtype), config)


def _space_to_depth(x, block):
    (b, h, w, c), (bh, bw) = x.shape, block
    x = x.reshape(b, h // bh, bh, w // bw, bw * c).transpose(0, 1, 3, 2, 4)
    return x.reshape(b, h // bh, w // bw, bh * bw * c)


def _depth_to_space(x, block):
    (b, h, w, c), (bh, bw) = x.shape, block
    x = x.reshape(b, h, w, bh, c // bh).transpose(0, 1, 3, 2, 4)
    return x.reshape(b, h * bh, w * bw, c // (bh * bw))


def _blocks_forward(strides, pads, x, k):
    geometry = _Blocks(strides, pads, x.shape, k.shape)
    kernel = geometry.kernel(k)
    y = jnp.tensordot(geometry.patches(x), kernel.reshape(-1, kernel.shape[3]), 1)
    y = _depth_to_space(y, geometry.t)
    return y[:, : geometry.out[0], : geometry.out[1]]


def _blocks_input_gradient(strides, pads, x, k, g):
    geometry = _Blocks(strides, pads, x.shape, k.shape)
    turned = geometry.kernel(k)[::-1, ::-1].swapaxes(2, 3)
    dx = _lax_conv((1, 1), ((1, 1), (1, 1)), geometry.cut_output(g), turned)
    dx = _depth_to_space(dx, geometry.block)
    return _pad_to(dx, [-low for low in geometry.low], x.shape[1:3])
