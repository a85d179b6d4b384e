"""The FLOPs of a program: of its products, convolutions and attention, read from its jaxpr.

Compilers do not tell: XLA counts no kernel of a library, which on a GPU is nearly all, and each loop's body
once. On an H100 it counted 0.4 % of what gpt2-124m computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ..models.attention import flops


def program_flops(jaxpr: Any, devices: int = 1) -> float:
    """The FLOPs of a call, on each of the `devices` that run it together.

    A loop without a stated number of turns counts as one turn, and of several branches the largest counts.
    What is computed again for a gradient counts again.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        inner = [times * program_flops(called) for called, _, times in called_by(equation)]
        total += max(inner) if inner else equation_flops(equation)
    return total / devices


def called_by(equation: Any) -> Iterator[tuple[Any, list[Any], int]]:
    """The jaxprs that an operation runs, or may run, what it gives each, and how often."""
    name, given = equation.primitive.name, equation.params
    if name == "cond":
        yield from ((branch.jaxpr, equation.invars[1:], 1) for branch in given["branches"])
    elif name == "while":
        yield given["body_jaxpr"].jaxpr, equation.invars[given["cond_nconsts"] :], 1
    else:
        times = given["length"] if name == "scan" else 1
        times *= given["mesh"].size if name == "shard_map" else 1  # its jaxpr is of one device
        times *= math.prod(given["grid_mapping"].grid) if name == "pallas_call" else 1
        for part in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            if (called := given.get(part)) is not None:
                yield getattr(called, "jaxpr", called), equation.invars, times
                return


def equation_flops(equation: Any) -> float:
    """Twice the multiplications of a product, a convolution or cuDNN's attention; 0 of another operation."""
    name, made = equation.primitive.name, math.prod(equation.outvars[0].aval.shape)
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * made * math.prod(equation.invars[0].aval.shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel, numbers = equation.invars[1].aval.shape, equation.params["dimension_numbers"]
        return 2.0 * made * math.prod(kernel) / kernel[numbers.rhs_spec[0]]
    if name.startswith("dot_product_attention_"):
        (rows, t, heads, d), (_, s, _, _) = (v.aval.shape for v in equation.invars[:2])
        share = 0.5 if "CAUSAL" in equation.params["mask_type"].name else 1.0
        return flops(rows * heads, t, s, d, share, 5 if "_bwd" in name else 2)
    return 0.0
