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

    *Fields:* `matrix` `(inputs, outputs)`, `a` `(inputs, rank)`, `b` `(rank, outputs)`, all with a
    leading axis over the layers of a stack. `a` and `b` may be wider than `matrix`. `reshape`
    splits axes of `matrix` alone: `a` and `b` follow in a product, which knows which axes are
    inputs.
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
        b = self.b.reshape(-1, *self.matrix.shape[1:])[outputs]
        return Adapted(self.matrix[outputs], self.a, b)

    def reshape(self, *shape: int) -> Adapted:
        return Adapted(self.matrix.reshape(shape), self.a, self.b)

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        x, one = _in_one_type(x, self)
        return x @ one.matrix + _again(jnp.matmul, x @ one.a, one.b)


def einsum(axes: str, x: jax.Array, kernel: Any) -> jax.Array:
    """`jnp.einsum(axes, x, kernel)`, where `kernel` may be `Adapted`, reshaped or not. It has its
    inputs first."""
    if not isinstance(kernel, Adapted):
        return jnp.einsum(axes, x, kernel)
    given, _, made = axes.partition("->")
    own, _, of_kernel = given.partition(",")
    inputs = [axis for axis in of_kernel if axis not in made]
    outputs = [axis for axis in of_kernel if axis in made]
    x, kernel = _in_one_type(x, kernel)
    shape = kernel.matrix.shape
    a = kernel.a.reshape(*shape[: len(inputs)], -1)
    b = kernel.b.reshape(-1, *shape[len(inputs) :])
    between = "".join(axis for axis in own if axis not in inputs) + "r"
    thin = jnp.einsum(f"{own},{''.join(inputs)}r->{between}", x, a)
    again = partial(jnp.einsum, f"{between},r{''.join(outputs)}->{made}")
    return jnp.einsum(axes, x, kernel.matrix) + _again(again, thin, b)


def _in_one_type(x: jax.Array, kernel: Adapted) -> tuple[jax.Array, Adapted]:
    """Both in the type of a product of `x` and the matrix, whatever that of `a` and `b` is."""
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(x.dtype, kernel.matrix.dtype)
    return x.astype(dtype), kernel.astype(dtype)


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


Sums = Sequence[tuple[Any, Adapted]]
"""Arrays that are sums, each with its parts."""
_SUMS: ContextVar[Sums] = ContextVar("sums", default=())


@contextmanager
def made_of(sums: Sums) -> Iterator[None]:
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
        if path not in kernels:
            return variable
        value = variable.get_value()
        found = next((parts for whole, parts in _SUMS.get() if whole is value), None)
        return variable if found is None else variable.replace(found)

    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, one(path, variable)) for path, variable in flat])
