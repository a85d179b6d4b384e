"""A stand-in for the GPU's compiler, so that tests of plans neither need it nor wait for it.

`from compilers import no_gpu_compiler` makes its fixture act on a test file. A program is answered with one
product and one pass over all the arrays that it names, and a sixth of them as temporary memory.
"""

import math
import re

import jax
import pytest

from chipwise.compile import compiled
from chipwise.compile.answers import Answer
from chipwise.compile.exports import Exported
from chipwise.compile.hlo.kernel import Kernel
from chipwise.planner import compile_step

_ARRAY = re.compile(r"tensor<((?:\d+x)*)([a-z]+)(\d+)>")


def answer(request):
    devices = 1
    if isinstance(request.program, Exported):
        text = jax.export.deserialize(bytearray(request.program.body)).mlir_module()
        sizes = [
            math.prod(int(n) for n in dims.split("x") if n) * max(int(bits) // 8, 1)
            for dims, _, bits in _ARRAY.findall(text)
        ]
    else:
        sent = request.program.arguments
        devices = sent["groups"] * sent["shards"]
        sizes = [4 * sent["size"]] * (sent["local"] + 1)
    total, side = sum(sizes), 1 + round(max(sizes) ** 0.5)
    product = Kernel(
        "gemm", "matmul", flops=2.0 * side**3, bytes=total / 2, dtype="f32", shape=(side,) * 3 + (1,)
    )
    passes = Kernel("fusion", "elementwise", bytes=float(total), dtype="f32", line="net.py:1")
    return Answer(
        request.name,
        temp_bytes=total // 6,
        flops=product.flops,
        kernels=[product, passes],
        wire_bytes=max(sizes) * 2 * (devices - 1) / devices,
    )


@pytest.fixture(autouse=True, scope="module")
def no_gpu_compiler():
    """Answers for GPUs by `answer`, without a process; a TPU's compiler is asked if it is there."""
    real = compile_step.compile_each
    begin = compile_step.begin_if_missing

    def compile_each(requests, **options):
        others = [i for i, r in enumerate(requests) if r.platform != "cuda"]
        yield from ((i, answer(r)) for i, r in enumerate(requests) if r.platform == "cuda")
        if others:
            yield from ((others[i], told) for i, told in real([requests[i] for i in others], **options))

    def begin_if_missing(request, *rest):
        if request.platform != "cuda":
            begin(request, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_step, "begin_if_missing", begin_if_missing)
        patch.setattr(compile_step, "compile_each", compile_each)
        patch.setattr(compiled, "compile_each", compile_each)
        patch.setattr(compile_step, "COMPILERS", {**compile_step.COMPILERS, "cuda": lambda: None})
        yield
