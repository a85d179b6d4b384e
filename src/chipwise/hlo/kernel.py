"""Kernels of a compiled step: bytes, FLOPs, time and source line.

Programs for GPUs and TPUs are read as lists of kernels, and a `Plan` keeps the costliest of its step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MOST = 60
"""How many a `Plan` keeps: programs have hundreds, most of which take no time worth showing."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a program: on a GPU what is launched, on a TPU an operation or a fusion of several.

    *Fields:*

    - `name`: the compiler's, such as "loop_add_fusion.3" or "cudnn-conv.17".
    - `kind`: "matmul", "convolution", "attention", "elementwise", "reduce", "copy", "collective" or "other".
    - `count`: executions, with loops multiplied out: per run of the program, or in a `Plan` per step.
    - `seconds`: of all these executions on one device; 0 if the compiler states no time.
    - `bytes`, `flops`, `work`: of *one* execution: memory traffic of the device, two for each multiply-add of
      its products, and elementwise operations (not counted on TPUs).
    - `bound`: what takes the time: "compute", "memory", "launch" or "interconnect"; "" if unknown.
    - `program`: of the step: "replica", "reduce" or "update".
    - `dtype`: in which products multiply ("bf16", "f16", "tf32", "f32"), or of the largest array.
    - `shape`: of a product, `(m, n, k, groups)`: `groups` products `(m, k) @ (k, n)`; otherwise empty.
    - `window`: of a GPU's convolution, taps along each dimension, then strides: `(3, 3, 1, 1)`.
    - `beside`: of a collective in a compiler's answer, the names of the kernels that run meanwhile.
    - `source`: JAX's name, such as "jit(flat)/transpose(jvp())/dot_general".
    - `line`: the user's source line, "path/to/net.py:38"; "" if unknown.
    """

    name: str
    kind: str
    count: float = 1.0
    seconds: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    bound: str = ""
    program: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    source: str = ""
    line: str = ""
    work: float = 0.0
    window: tuple[int, ...] = ()
    beside: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Kernel:
        lists = {name: tuple(value.get(name, ())) for name in ("shape", "window", "beside")}
        return cls(**{**value, **lists})

    def times(self, runs: float) -> Kernel:
        """The kernel for `runs` runs of the program."""
        return dataclasses.replace(self, count=self.count * runs, seconds=self.seconds * runs)


def costliest(kernels: Iterable[Kernel], most: int = MOST) -> tuple[Kernel, ...]:
    """The `most` costliest kernels, longest first. Equal kernels of one line, such as a layer of each block,
    are merged: executions and seconds are summed, bytes and operations averaged."""
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
