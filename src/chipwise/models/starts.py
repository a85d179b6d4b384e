"""Initial values of kernels: the identity, or filters computed from the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

_AT_ONCE = 250  # images whose patches are in memory


def dirac(rest: Callable) -> Callable:
    """An initializer of convolution kernels `(h, w, c_in, c_out)`: the first `c_in` filters are the identity,
    as in `torch.nn.init.dirac_` (Zagoruyko & Komodakis, 2017, arXiv:1706.00388); the others come from the
    initializer `rest`."""

    def start(key, shape, dtype=jnp.float32, *more):
        h, w, c_in, c_out = shape
        kernel = rest(key, shape, dtype, *more)
        same = min(c_in, c_out)
        identity = np.zeros((h, w, c_in, same), np.float32)
        identity[h // 2, w // 2, np.arange(same), np.arange(same)] = 1
        return jnp.concatenate([jnp.asarray(identity, dtype), kernel[..., same:]], axis=-1)

    return start


def whitening(
    source: Any, mean: Sequence[float], std: Sequence[float], *, size: int = 2, images: int = 5_000,
    epsilon: float = 5e-4,
) -> np.ndarray:  # fmt: skip
    """A whitening kernel `(size, size, channels, 2 * size * size * channels)` float32: its outputs are
    uncorrelated with variance 1, and their negatives.

    It has the eigenvectors of the `size` × `size` patches of the first `images` images of `source`, each
    divided by the root of its eigenvalue plus `epsilon`. `mean` and `std` of each channel normalise the net's
    input. Sums are of integers in float64, so they are exact in any order.

    Source: Page, "How to train your ResNet 8" (2019), and Jordan (2024, arXiv:2404.00498).
    """
    count = min(images, len(source))
    first, second = np.zeros(()), np.zeros(())
    patches = 0
    for start in range(0, count, _AT_ONCE):
        some = range(start, min(start + _AT_ONCE, count))
        pixels = np.stack([np.asarray(source[i]["image"]) for i in some]).astype(np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(pixels, (size, size), axis=(1, 2))
        rows = windows.transpose(0, 1, 2, 4, 5, 3).reshape(-1, size * size * pixels.shape[-1])
        first, second = first + rows.sum(0), second + rows.T @ rows
        patches += len(rows)
    # Moments of the normalised pixels, from those of the stored ones
    m, s = (np.tile(np.asarray(x, np.float64), size * size) for x in (mean, std))
    cross = np.outer(first / patches, m)
    moments = (second / patches - cross - cross.T + np.outer(m, m)) / np.outer(s, s)
    values, vectors = np.linalg.eigh(moments)
    values, vectors = values[::-1], vectors[:, ::-1]  # the largest first
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(0)[None], axis=0)
    filters = vectors * np.sign(largest) / np.sqrt(values + epsilon)
    return np.concatenate([filters, -filters], 1).reshape(size, size, len(mean), -1).astype(np.float32)
