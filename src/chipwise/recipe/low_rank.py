"""LoRA: frozen matrices, each with the product of two trained thin ones added to it.

This is a general transform of parameters. The model is called with the sums, so it needs no
knowledge of adapters. Everything that reads a trained model gets the sums too. Our stacks of blocks
know what the sums are made of, and multiply with the parts: `chipwise.models.adapted`.
"""

from __future__ import annotations

import fnmatch
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base import RecipeError, invalid, near
from ..base.annotations import as_annotated
from ..models import wide
from ..models.adapted import Adapted
from . import precision
from .optimizers import STACKED


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapter:
    """The trained part of one matrix.

    *Fields:* `lora_a` `(..., inputs, rank)` and `lora_b` `(..., rank, outputs)`: float32 or wider,
    with a leading axis over the layers of a stack. `scale`: multiplies their product. `turned`:
    whether the matrix is `(outputs, inputs)`.
    """

    lora_a: Any
    lora_b: Any
    scale: float = field(metadata={"static": True})
    turned: bool = field(metadata={"static": True})

    def merged(self, matrix: Any) -> Any:
        """`matrix` with the product added, in its shape and dtype. Works when traced and when not.
        NumPy gives NumPy, and an array on devices keeps its sharding."""
        if isinstance(matrix, jax.core.Tracer):
            return self._added(matrix)
        place = getattr(matrix, "sharding", None)
        stacked = self.lora_a.ndim > 2
        added = Adapter._added_by_layer if stacked else Adapter._added
        whole = jax.jit(added, out_shardings=place)(self, matrix)
        return np.asarray(whole) if place is None else whole

    def beside(self, matrix: Any, dtype: Any) -> Adapted | None:
        """The parts of the merged `matrix`, which is in `dtype`. None for matrices of several axes,
        and for turned ones, with which no layer of ours multiplies."""
        if self.turned or matrix.ndim != self.lora_a.ndim:
            return None
        return Adapted(matrix.astype(dtype), self.lora_a, self.scale * self.lora_b)

    def _added_by_layer(self, matrix: Any) -> Any:
        """The sum for each layer of a stack in turn: the products of all layers at once would take
        twice the memory of a bfloat16 stack."""
        return jax.lax.map(lambda one: one[0]._added(one[1]), (self, matrix))

    def _added(self, matrix: Any) -> Any:
        with precision.products("f32"):
            change = self.scale * (self.lora_a @ self.lora_b)
        change = change.swapaxes(-1, -2) if self.turned else change
        return (matrix.astype(change.dtype) + change.reshape(matrix.shape)).astype(matrix.dtype)


@as_annotated
@dataclass(frozen=True)
class lora:
    """Low-rank adapters, for `Recipe(adapters=...)`. Each matrix W whose path matches is replaced
    by W + alpha / rank * A B. A and B are trained, and W is frozen (Hu et al., 2021,
    arXiv:2106.09685, section 4.1).

        on = ("*/query/*kernel", "*/value/*kernel")
        Recipe(adapters=cw.recipe.lora(rank=16, alpha=32, on=on), ...)

    *Arguments:*

    - `rank`: the rank of A B.
    - `alpha`: the scale, divided by `rank`.
    - `on`: patterns of the paths of matrices, for `fnmatch`.
    - `stacked`: a pattern of paths whose arrays have a layer in each row. Each row gets its own A
      and B.

    A is `(inputs, rank)`, uniform within 1 / sqrt(inputs) as in loralib. B is `(rank, outputs)`,
    zero, so training starts from the weights as they are. A matrix called weight (PyTorch, Equinox)
    is `(outputs, *inputs)`. All others are `(*inputs, outputs)`, such as a convolution's kernel.
    But of three axes, the outputs are the last two if that is nearer to a square: attention has
    `(width, heads, head_width)` and `(heads, head_width, width)`. The paths are those of W followed
    by `lora_a` and `lora_b`: `"*/lora_b"` in `cw.recipe.grouped`.

    Raises `RecipeError` for a rank below 1, an alpha that is not above 0, or no patterns. When
    used, raises it for a pattern without a match, a match that is no matrix, and a rank above a
    side of the matrix.
    """

    rank: int
    alpha: float
    on: str | tuple[str, ...]
    stacked: str = STACKED

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise invalid("lora-rank", "rank", self.rank, "a whole number of at least 1")
        if not 0 < self.alpha < math.inf:
            raise invalid(
                "lora-alpha", "alpha", self.alpha, "a number above 0, such as twice the rank"
            )
        on = (self.on,) if isinstance(self.on, str) else self.on
        if not len(on):
            raise invalid(
                "lora-on", "on", self.on, "patterns of paths, such as ('*/query/*kernel',)"
            )
        object.__setattr__(self, "on", tuple(on))

    def describe(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {
            "rank": self.rank,
            "alpha": self.alpha,
            "on": list(self.on),
            "stacked": self.stacked,
        }

    def adapters(self, leaves: Mapping[str, Any], key: jax.Array) -> dict[str, Adapter]:
        """The first adapters of those of `leaves`, by path, that match. Raises `RecipeError` as
        `lora` does when used."""
        for pattern in self.on:
            if not fnmatch.filter(leaves, pattern):
                raise RecipeError(
                    "adapters-match-nothing",
                    pattern=pattern,
                    near=near(pattern, leaves),
                    names=list(leaves),
                )
        named = {
            p: w for p, w in leaves.items() if any(fnmatch.fnmatchcase(p, one) for one in self.on)
        }
        return {path: self._first(path, matrix, key) for path, matrix in named.items()}

    def _first(self, path: str, matrix: Any, key: jax.Array) -> Adapter:
        layers = int(matrix.ndim > 1 and fnmatch.fnmatchcase(path, self.stacked))
        stack = matrix.shape[:layers]
        shape = matrix.shape[layers:]
        if len(shape) < 2 or not jnp.issubdtype(matrix.dtype, jnp.floating):
            raise RecipeError(
                "adapter-without-matrix",
                path=path,
                shape=list(matrix.shape),
                dtype=str(matrix.dtype),
                on=self.on,
            )
        turned = _is_turned(path)
        last = len(shape) - 1
        cuts = (1,) if turned else (1, last) if last == 2 else (last,)
        sides = min(((math.prod(shape[:k]), math.prod(shape[k:])) for k in cuts), key=max)
        if self.rank > min(sides):
            raise RecipeError(
                "adapter-rank", path=path, rank=self.rank, sides=list(sides), most=min(sides)
            )
        inputs, outputs = sides[::-1] if turned else sides
        dtype = wide(matrix.dtype)
        bound = 1 / math.sqrt(inputs)
        own = jax.random.fold_in(key, zlib.crc32(path.encode()))  # whatever else matches
        a = jax.random.uniform(own, (*stack, inputs, self.rank), dtype, -bound, bound)
        return self._of(path, a, jnp.zeros((*stack, self.rank, outputs), dtype))

    def _of(self, path: str, a: Any, b: Any) -> Adapter:
        return Adapter(a, b, self.alpha / self.rank, _is_turned(path))

    def merged(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of a checkpoint, by names such as `params.query.kernel`, with the adapters
        merged into them. Raises `KeyError` if a part of an adapter is missing."""
        whole = {name: x for name, x in arrays.items() if not name.endswith((".lora_a", ".lora_b"))}
        for name in {n.rpartition(".")[0] for n in arrays.keys() - whole.keys()}:
            a = arrays[f"{name}.lora_a"]
            b = arrays[f"{name}.lora_b"]
            whole[name] = self._of(name.replace(".", "/"), a, b).merged(whole[name])
        return whole


def _is_turned(path: str) -> bool:
    """Whether the matrix at `path` is `(outputs, inputs)`."""
    return "weight" in path.rpartition("/")[2]
