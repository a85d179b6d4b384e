"""Kernels of a compiled step: bytes, FLOPs, time and source line.

Programs for GPUs and TPUs are read as lists of kernels, and a `Plan` keeps the costliest of its
step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MOST = 60
"""The number of kernels that a `Plan` keeps. Programs have hundreds, and most take no time worth
showing."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a program: a launch on a GPU, an operation or a fusion of several on a TPU."""

    name: str
    """The compiler's name, such as "loop_add_fusion.3" or "cudnn-conv.17"."""
    kind: str
    """One of "matmul", "convolution", "attention", "elementwise", "reduce", "copy", "collective"
    and "other"."""
    count: float = 1.0
    """Executions per run of the program, or per step in a `Plan`, with loops multiplied out."""
    seconds: float = 0.0
    """Seconds of all these executions on one device, or 0 if the compiler states no time."""
    bytes: float = 0.0
    """The device's memory traffic in *one* execution."""
    flops: float = 0.0
    """The FLOPs of the products in *one* execution, two for each multiply-add."""
    bound: str = ""
    """What takes the time: "compute", "memory", "launch" or "interconnect". It is "" if unknown."""
    program: str = ""
    """The program of the step: "replica", "reduce" or "update"."""
    dtype: str = ""
    """The dtype in which products multiply ("bf16", "f16", "tf32", "f32"), or that of the largest
    array."""
    shape: tuple[int, ...] = ()
    """`(m, n, k, groups)` for `groups` products `(m, k) @ (k, n)`. It is empty for other
    kernels."""
    source: str = ""
    """JAX's name, such as "jit(flat)/transpose(jvp())/dot_general"."""
    line: str = ""
    """The user's source line, such as "path/to/net.py:38". It is "" if unknown."""
    work: float = 0.0
    """The elementwise operations in *one* execution. They are not counted on TPUs."""
    window: tuple[int, ...] = ()
    """Taps along each dimension, then strides, of a GPU's convolution: `(3, 3, 1, 1)`."""
    beside: tuple[str, ...] = ()
    """The names of the kernels that run during a collective, in a compiler's answer."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Kernel:
        lists = {name: tuple(value.get(name, ())) for name in ("shape", "window", "beside")}
        return cls(**{**value, **lists})

    def times(self, runs: float) -> Kernel:
        """Returns the kernel for `runs` runs of the program."""
        return dataclasses.replace(self, count=self.count * runs, seconds=self.seconds * runs)


def costliest(kernels: Iterable[Kernel], most: int = MOST) -> tuple[Kernel, ...]:
    """Returns the `most` costliest kernels, longest first. Equal kernels of one line, such as a
    layer of each block, are merged. Their executions and seconds are summed, and their bytes and
    FLOPs are averaged."""
    alike: dict[tuple, list[Kernel]] = {}
    for one in kernels:
        place = one.line or one.source or one.name
        key = (one.program, one.kind, one.bound, one.dtype, one.shape, place)
        alike.setdefault(key, []).append(one)
    return tuple(sorted(map(_together, alike.values()), key=lambda kernel: -kernel.seconds)[:most])


def _together(kernels: list[Kernel]) -> Kernel:
    first = max(kernels, key=lambda kernel: kernel.seconds)
    count = sum(kernel.count for kernel in kernels)
    each = count or 1.0
    return dataclasses.replace(
        first,
        count=count,
        seconds=sum(kernel.seconds for kernel in kernels),
        bytes=sum(kernel.count * kernel.bytes for kernel in kernels) / each,
        flops=sum(kernel.count * kernel.flops for kernel in kernels) / each,
    )
