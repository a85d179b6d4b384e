"""Several devices on any machine: the CPU backend divided into `n` devices.

Programs that shard, reduce and gather then run here exactly as on `n` chips, only slower.
"""

from __future__ import annotations

from typing import Any

import jax

from ..errors import DeviceError


def simulate(n: int) -> None:
    """Makes JAX start with `n` CPU devices and leave any accelerator alone, in this process, for good.

    Call it before the first JAX operation: JAX fixes its devices when it first needs them. An `XLA_FLAGS`
    that asks for another number gives way. Calling it again with the same `n` does nothing.

    Raises `DeviceError` when `n` is not a whole number of at least 1, or when JAX has already started
    with other devices.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise DeviceError("device-count-not-whole", count=n)
    if not started():
        # Not through XLA_FLAGS: XLA reads that variable once, which may be over, and it may hold the
        # user's own flags. JAX's setting overrides it.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", n)
        return
    here = jax.devices()
    if here[0].platform == "cpu" and len(here) == n:
        return
    raise DeviceError("simulate-too-late", count=n, here=len(here), kind=here[0].device_kind)


def started() -> bool:
    """Whether JAX has fixed its devices, found out without starting it.

    JAX has no public question for this, but it refuses to change `jax_num_cpu_devices` once started.
    """
    before = setting("jax_num_cpu_devices")
    try:
        jax.config.update("jax_num_cpu_devices", before + 2)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", before)
    return False


def setting(name: str) -> Any:
    """A setting of JAX such as `"jax_platforms"`. JAX makes the attributes as it runs, unseen by types."""
    return getattr(jax.config, name)
