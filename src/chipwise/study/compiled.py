"""One compilation for all runs of a study.

The seed and the schedules' values are inputs of the compiled programs, so runs that differ in nothing else
have equal ones. JAX's own cache of compiled programs, in a folder that lives as long as the study is worked
on, hands them from run to run and from process to process.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from ..machine.simulate import setting

# Of what takes so long to compile that reading it back is faster
_SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextlib.contextmanager
def one_compilation() -> Iterator[dict[str, str]]:
    """While it is open, this process compiles no program twice.

    *Returns* the environment in which other processes share in that. A cache that the user has set up stays
    as it is.
    """
    if setting("jax_compilation_cache_dir"):
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="chipwise-compiled-") as folder:
        wanted = {"jax_compilation_cache_dir": folder, **_SETTINGS}
        before = {name: setting(name) for name in wanted}
        _set(wanted)
        try:
            yield {name.upper(): str(value) for name, value in wanted.items()}
        finally:
            _set(before)


def _set(values: dict) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX looks at these settings once, at the first compilation
