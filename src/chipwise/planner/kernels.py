"""One kernel of a compiled step: what it moves and computes, how long it takes, which line asked for it.

Every compiled program gives a list of them, a GPU's as well as a TPU's, and a `Plan` keeps the costliest of
its step.
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

    - `name`: the compiler's own, such as "loop_add_fusion.3" or "cudnn-conv.17".
    - `kind`: "matmul", "convolution", "attention", "elementwise", "reduce", "copy", "collective" or "other".
    - `count`: executions, loops multiplied out: in one run of the program, in a `Plan` in one step.
    - `seconds`: of all these executions on one device; 0 where the compiler names no time.
    - `bytes`, `flops`, `work`: of *one* execution: memory traffic of the device, two for each multiply-add of
      its products, and elementwise arithmetic (on TPUs not counted).
    - `bound`: what takes the time: "compute", "memory", "launch" or "interconnect"; "" where there is none.
    - `program`: of the step: "replica", "reduce" or "update".
    - `dtype`: that products multiply in ("bf16", "f16", "tf32", "f32"), or of the largest array.
    - `shape`: of a product, `(m, n, k, groups)`: `groups` products `(m, k) @ (k, n)`; otherwise empty.
    - `source`: what JAX calls it, such as "jit(flat)/transpose(jvp())/dot_general".
    - `line`: the user's line that it comes from, "path/to/net.py:38"; "" where the program does not say.
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

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Kernel:
        return cls(**{**value, "shape": tuple(value["shape"])})

    def times(self, runs: float) -> Kernel:
        """`runs` runs of it."""
        return dataclasses.replace(self, count=self.count * runs, seconds=self.seconds * runs)


def costliest(kernels: Iterable[Kernel], most: int = MOST) -> tuple[Kernel, ...]:
    """The `most` that take longest, longest first. Those of one line that do the same, such as a layer of
    each block, are one with the sum of their executions and seconds, and bytes and operations on average."""
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
