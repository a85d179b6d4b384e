"""Products with adapted matrices: `x W + (x A) B`, without the sum `W + A B`.

A loss gets the sums of `chipwise.recipe.low_rank`, as arrays like others. `Blocks` asks here what
these are sums of, and its layers multiply with the parts. If nothing else reads a sum, the compiler
drops it. So neither a second copy of the weights nor the gradient by a whole matrix exists. A sum
that passed through other functions, or whose layer is none of ours, is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """The matrix `matrix + a @ b`, by its parts. It has what our layers need of an array.

    *Fields:* `matrix` `(inputs, outputs)`, `a` `(inputs, rank)`, `b` `(rank, outputs)`, of one
    dtype, all with a leading axis over the layers of a stack. `reshape` makes several axes of the
    inputs or of the outputs.
    """

    matrix: Any
    a: Any
    b: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    def astype(self, dtype: Any) -> Adapted:
        return jax.tree.map(lambda part: part.astype(dtype), self)

    def __getitem__(self, outputs: Any) -> Adapted:
        return Adapted(self.matrix[outputs], self.a, self.b[outputs])

    def reshape(self, *shape: int) -> Adapted:
        matrix = self.matrix.reshape(shape)
        if len(self.a) == len(matrix):
            return Adapted(matrix, self.a, self.b.reshape(-1, *matrix.shape[1:]))
        return Adapted(matrix, self.a.reshape(*matrix.shape[:-1], -1), self.b)

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        return x @ self.matrix + _again(jnp.matmul, x @ self.a, self.b)


def einsum(axes: str, x: jax.Array, kernel: Any) -> jax.Array:
    """`jnp.einsum(axes, x, kernel)`, where `kernel` may be `Adapted`, reshaped or not."""
    product = partial(jnp.einsum, axes)
    if not isinstance(kernel, Adapted):
        return product(x, kernel)
    whole = product(x, kernel.matrix)
    if kernel.a.ndim > 2:
        return whole + _again(jnp.matmul, product(x, kernel.a), kernel.b)
    return whole + _again(product, x @ kernel.a, kernel.b)


def _again(product: Callable[..., jax.Array], thin: jax.Array, b: jax.Array) -> jax.Array:
    """`product(thin, b)`, with an axis of one entry that both have. So the policies of
    `cw.models.remat` that keep products with parameters compute this one again. Otherwise a layer
    would keep two arrays of its output's size."""
    return jax.vmap(product)(thin[None], b[None])[0]


class Linear(nnx.Linear):
    """`nnx.Linear` whose kernel may be `Adapted`."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        kernel = self.kernel[...]
        if not isinstance(kernel, Adapted):
            return super().__call__(inputs, out_sharding)
        y = inputs @ kernel
        return y if self.bias is None else y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))


Beside = Callable[[Any], Adapted | None]
"""From a dtype to the parts of a sum, or None for one that no `Linear` has."""
_SUMS: ContextVar[Sequence[tuple[Any, Beside]]] = ContextVar("sums", default=())


@contextmanager
def made_of(sums: Sequence[tuple[Any, Beside]]) -> Iterator[None]:
    """A context for tracing a loss: what these arrays are sums of."""
    token = _SUMS.set(sums)
    try:
        yield
    finally:
        _SUMS.reset(token)


def by_parts(module: nnx.Module, state: nnx.State) -> nnx.State:
    """`state`, the arrays of `module`, with the parts in place of each kernel of a `Linear` that is
    a known sum."""
    if not _SUMS.get():
        return state
    kernels = {
        (*path, "kernel") for path, part in nnx.iter_modules(module) if isinstance(part, Linear)
    }

    def one(path: tuple, variable: Any) -> Any:
        value = variable.get_value()
        found = [beside for whole, beside in _SUMS.get() if path in kernels and whole is value]
        parts = found[0](value.dtype) if found else None
        return variable if parts is None else variable.replace(parts)

    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, one(path, variable)) for path, variable in flat])
