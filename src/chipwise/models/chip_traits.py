"""The chip that a program is traced for, which selects kernels that only some chips have.

Tracing does not know the device: a plan traces for absent chips. So the caller states it,

    with traced_for(chip): jax.jit(f).lower(...)

and `jax.jit` traces again for another chip. The default is JAX's default device.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax

from ..chips.catalogue import Chip


class ChipTraits(NamedTuple):
    """The traits of a chip that select kernels. Chips with equal values share a trace.

    *Fields:* `platform`: "cpu", "cuda", "rocm" or "tpu". `fuses`: whether there is a fused
    attention kernel, as on TPU v4 or later and on NVIDIA GPUs of compute capability 8.0 or higher.
    `by_heads`: whether Llama's products give arrays of heads. They do on TPUs except the 7x, where
    a step takes 4 to 6 % longer that way, by its compiler.
    """

    platform: str
    fuses: bool = False
    by_heads: bool = False

    @classmethod
    def of(cls, device: Chip | jax.Device) -> ChipTraits:
        """The traits of a chip in the catalogue, or of a present device."""
        if isinstance(device, Chip):
            if device.kind == "TPU":
                return cls._tpu(device.name)
            if device.kind == "GPU" and device.vendor == "NVIDIA":
                return cls("cuda", (device.year or 0) >= 2020)  # Ampere's year
            return cls("rocm" if device.kind == "GPU" else "cpu")
        if device.platform == "tpu":
            return cls._tpu(device.device_kind)
        if device.platform in ("gpu", "cuda", "rocm"):
            capability = str(getattr(device, "compute_capability", ""))
            if re.fullmatch(r"\d+\.\d", capability):
                return cls("cuda", float(capability) >= 8)
            return cls("rocm")
        return cls("cpu")

    @classmethod
    def _tpu(cls, name: str) -> ChipTraits:
        match = re.search(r"TPU\s*v?(\d+)", name)
        generation = int(match[1]) if match else 0
        return cls("tpu", generation >= 4, generation < 7)


_STATED: Any = jax.make_user_context(None)


def traced_for(device: Chip | jax.Device | None) -> AbstractContextManager[Any]:
    """A context in which programs are traced for `device`. `None` changes nothing."""
    return nullcontext() if device is None else _STATED(ChipTraits.of(device))


def by_platform(*operands: Any, default: Callable[..., Any], **branches: Callable[..., Any]) -> Any:
    """`lax.platform_dependent`, but only the branch of the chip is traced if it was stated."""
    if _STATED.value is None:
        return jax.lax.platform_dependent(*operands, default=default, **branches)
    return branches.get(_STATED.value.platform, default)(*operands)


_ASKED: set[str] = set()


def depends_on_chip(platform: str) -> bool:
    """Whether a program traced so far for `platform` read `traits`, and not only the platform. If
    none did, a program has one trace for all chips of the platform."""
    return platform in _ASKED


def platform() -> str:
    """The platform to trace for."""
    return _stated().platform


def on_gpu() -> bool:
    """Whether to trace for a GPU."""
    return platform() in ("cuda", "rocm")


def traits() -> ChipTraits:
    """The chip to trace for."""
    stated = _stated()
    _ASKED.add(stated.platform)
    return stated


def _stated() -> ChipTraits:
    if _STATED.value is not None:
        return _STATED.value
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return ChipTraits.of(default if isinstance(default, jax.Device) else jax.devices(default)[0])
