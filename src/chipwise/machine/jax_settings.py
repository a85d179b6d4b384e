"""Reads settings of JAX, and whether they can still be changed."""

from __future__ import annotations

from typing import Any

import jax


def started() -> bool:
    """Whether JAX has fixed its devices. Does not start it.

    JAX has no public function for this, but refuses to change `jax_num_cpu_devices` once started.
    """
    before = setting("jax_num_cpu_devices")
    try:
        jax.config.update("jax_num_cpu_devices", before + 2)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", before)
    return False


def setting(name: str) -> Any:
    """A setting of JAX such as `"jax_platforms"`, whose attributes type checkers do not know."""
    return getattr(jax.config, name)
