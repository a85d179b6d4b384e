"""Which parameters and statistics stay as they are: patterns of paths, and what a step that is traced knows.

The step holds frozen arrays still. A layer whose running statistics are frozen should also use them, as in
evaluation; that is the model's part, so the doors of `interop` ask `holds` while they are traced.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from ..errors import RecipeError, near

_STATISTICS = ("mean", "var", "variance", "num_batches_tracked", "batch_counter")
MOVING = tuple(f"!*{name}" for name in _STATISTICS)
"""Patterns of the statistics that move, of which a model need not have any."""


def freeze(*patterns: str, batch_norm: str = "eval") -> tuple[str, ...]:
    """What training does not change, for `Recipe(frozen=...)`: `frozen=cw.freeze("backbone/*")`.

    Frozen parameters have no gradient and no place in the optimizer. Batch norm whose statistics are frozen
    uses them, as in evaluation, and they stay.

    *Arguments:* `patterns` of the paths of parameters and statistics, as of `fnmatch`. One that begins with
    `!` takes out again what those before it froze: `freeze("*", "!classifier/*")` is all but the head.
    `batch_norm="train"`: statistics move, and batch norm uses those of its batch; its scale and shift are
    frozen like other parameters.

    Raises `RecipeError` for no patterns and another `batch_norm`.
    """
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise RecipeError("frozen-not-patterns", frozen=repr(patterns))
    if batch_norm not in ("eval", "train"):
        choices = ["eval", "train"]
        raise RecipeError("freeze-batch-norm", given=batch_norm, near=near(str(batch_norm), choices))
    return (*patterns, *(MOVING if batch_norm == "train" else ()))


def is_frozen(path: str, patterns: Sequence[str]) -> bool:
    """Whether the last of `patterns` that fits `path`, such as "norm/mean", freezes it. Linen's collection
    of statistics is no part of the path."""
    path = path.removeprefix("batch_stats/")
    fits = (p for p in reversed(patterns) if fnmatch.fnmatchcase(path, p.removeprefix("!")))
    return not next(fits, "!").startswith("!")


_PATTERNS: Any = jax.make_user_context(())  # a part of the key by which JAX keeps traces


def holding(patterns: tuple[str, ...]) -> AbstractContextManager[Any]:
    """Within it, a training step is traced that freezes `patterns`."""
    return _PATTERNS(patterns)


def patterns() -> tuple[str, ...]:
    """Those of the step that is traced."""
    return _PATTERNS.value


def holds(statistics: Iterable[str]) -> bool:
    """Whether the step that is traced freezes one of these paths."""
    return any(is_frozen(path, _PATTERNS.value) for path in statistics)
