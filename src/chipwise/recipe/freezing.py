"""Frozen parameters and statistics: patterns of paths, and a context for the step while it is
traced.

The step keeps frozen arrays constant. A layer with frozen running statistics should also use them,
as in evaluation. Only the model can do that, so the modules of `interop` call `holds` while they
are traced.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax

from ..base import RecipeError, unknown
from ..base.annotations import as_annotated

_STATISTICS = ("mean", "var", "variance", "num_batches_tracked", "batch_counter")
MOVING = tuple(f"!*{name}" for name in _STATISTICS)
"""Patterns of the statistics that move. A model need not have any of them."""


@as_annotated
def freeze(*patterns: str, batch_norm: str = "eval") -> tuple[str, ...]:
    """What training does not change, for `Recipe(frozen=...)`: `cw.recipe.freeze("backbone/*")`.

    Frozen parameters have no gradient and no optimizer state. Batch norm with frozen statistics
    uses them, as in evaluation, and does not update them.

    *Arguments:* `patterns`: match the paths of parameters and statistics, by `fnmatch`. A pattern
    that begins with `!` excludes: `freeze("*", "!classifier/*")` is everything but the head. With
    `batch_norm="train"`, batch norm uses the statistics of its batch and updates the running ones.
    Its scale and shift are frozen like other parameters.

    Raises `RecipeError` for no patterns and for another `batch_norm`.
    """
    if not patterns:
        raise RecipeError("frozen-not-patterns", frozen=repr(patterns))
    if batch_norm not in ("eval", "train"):
        choices = ["eval", "train"]
        raise unknown("freeze-batch-norm", "batch_norm", batch_norm, choices)
    return (*patterns, *(MOVING if batch_norm == "train" else ()))


def is_frozen(path: str, patterns: Sequence[str]) -> bool:
    """Whether the last of `patterns` that matches `path`, such as "norm/mean", freezes it. The name
    of Linen's collection of statistics is not part of the path."""
    path = path.removeprefix("batch_stats/")
    fits = (p for p in reversed(patterns) if fnmatch.fnmatchcase(path, p.removeprefix("!")))
    return not next(fits, "!").startswith("!")


_PATTERNS: Any = jax.make_user_context(())  # a part of the key by which JAX keeps traces


def holding(patterns: tuple[str, ...]) -> AbstractContextManager[Any]:
    """A context for tracing a training step that freezes `patterns`."""
    return _PATTERNS(patterns)


def patterns() -> tuple[str, ...]:
    """The patterns of the step being traced."""
    return _PATTERNS.value


def holds(statistics: Iterable[str]) -> bool:
    """Whether the step being traced freezes one of these paths."""
    return any(is_frozen(path, _PATTERNS.value) for path in statistics)
