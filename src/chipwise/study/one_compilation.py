"""Runs of a study compile each program once.

The seed and the values of schedules are inputs of the compiled programs, so runs that differ only in these
share programs. JAX's compilation cache, in a folder that exists while the study runs, passes them on.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from ..machine import kept
from ..machine.detect import setting


@contextlib.contextmanager
def one_compilation() -> Iterator[None]:
    """A context in which no program is compiled twice. A cache that is set already stays in use."""
    kept.key_by_processor()
    kept.write_whole()
    if setting("jax_compilation_cache_dir"):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="chipwise-compiled-") as folder:
        cache = {"jax_compilation_cache_dir": folder, **kept.SETTINGS}
        before = {name: setting(name) for name in cache}
        _set(cache)
        try:
            yield
        finally:
            _set(before)


def _set(values: dict[str, Any]) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX reads these settings once, at the first compilation
