"""Products never read a parameter at an address within the flat vector that cuBLASLt refuses.

It refuses products of bfloat16 at an address that is no multiple of 16 bytes. BERT's classifier has
a bias of two values, so all that follows in the vector is off by 4 bytes.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

import chipwise as cw
from chipwise.chips.targets import parse
from chipwise.compile.cache import compile_each
from chipwise.models.chip_traits import traced_for
from chipwise.models.remat import inside
from chipwise.planner.compile_step import _requests
from chipwise.planner.tracing import training_step
from chipwise.step.flat import Flat
from chipwise.step.layout import Layout

ALIGNED = 16
BYTES = {"bf16": 2, "f16": 2, "f32": 4, "s8": 1, "s32": 4}
INSTRUCTION = re.compile(r"%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(([^)]*)\)(.*)")
PASSED_ON = ("bitcast", "get-tuple-element", "opt-barrier", "reshape")


def misaligned(hlo):
    """The operands of a library's products that lie off 16 bytes within another array, by name."""
    found = set()
    for computation in re.split(r"\n}\n", hlo):
        made = {m[1]: m.groups() for m in INSTRUCTION.finditer(computation)}
        for _, _, opcode, operands, rest in made.values():
            if opcode == "custom-call" and re.search(r'custom_call_target="__cu(blas|dnn)', rest):
                found |= {n for n in re.findall(r"%([\w.-]+)", operands) if start(made, n) % ALIGNED}
    return found


def start(made, name, index=0):
    """Where `name` begins, in bytes, within the array that was written."""
    *_, opcode, operands, rest = made.get(name, (name, "", "parameter", "", ""))
    sources = re.findall(r"%([\w.-]+)", operands)
    if opcode == "tuple":
        return start(made, sources[index])
    if opcode in PASSED_ON:
        index = int(got[1]) if (got := re.search(r"index=(\d+)", rest)) else index
        return start(made, sources[0], index)
    if opcode != "slice":
        return 0
    dtype, lengths = re.match(r"(\w+)\[([\d,]*)", made[sources[0]][1]).groups()
    dims = [int(n) for n in lengths.split(",")]
    firsts = [int(n) for n in re.findall(r"\[(\d+):", rest.partition("slice={")[2].partition("}")[0])]
    steps = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    return BYTES[dtype] * sum(a * b for a, b in zip(firsts, steps, strict=True))


def program(first, copied):
    """A fusion that reads a matrix behind `first` values of a vector, as XLA writes it, or a copy."""
    part = "fusion(%part), kind=kLoop, calls=%copies" if copied else "bitcast(%part)"
    return f"""
%reads (p0: bf16[70000], p1: bf16[512,256]) -> bf16[512,256] {{
  %p0 = bf16[70000]{{0}} parameter(0)
  %p1 = bf16[512,256]{{1,0}} parameter(1)
  %part = bf16[65536]{{0}} slice(%p0), slice={{[{first}:{first + 65536}]}}
  %matrix = bf16[256,256]{{1,0}} {part}
  ROOT %made = (bf16[512,256], s8[9]) custom-call(%p1, %matrix), custom_call_target="__cublas$lt$matmul"
}}
"""


@pytest.mark.parametrize("first, expected", [(0, set()), (8, set()), (2, {"matrix"}), (12, {"matrix"})])
def test_a_product_within_a_vector_is_found_unless_it_reads_a_copy(first, expected):
    assert misaligned(program(first, copied=False)) == expected
    assert misaligned(program(first, copied=True)) == set()


@pytest.mark.parametrize("bias", [1, 2, 7, 8, 9, 16])
def test_a_matrix_off_16_bytes_gets_an_array_of_its_own_on_nvidia_s_gpus(bias):
    shapes = {"bias": (bias,), "kernel": (4, 4)}
    flat = Flat({n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in shapes.items()}, dtype=jnp.bfloat16)
    with traced_for(parse("h100").chip):
        made = jax.make_jaxpr(flat.unpack)(flat.shape)
    names = [one.primitive.name for part in inside(made.jaxpr) for one in part.eqns]
    assert names.count("optimization_barrier") == (bias * 2 % ALIGNED != 0)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 8])
def test_no_product_of_bert_reads_an_operand_off_16_bytes(classes):
    sizes = ["depth=2", "width=64", "heads=2", "vocabulary=64", "length=16", f"classes={classes}"]
    recipe = cw.load("bert-base", ["batch=8", "replicas=2", "precision=bf16", *sizes], synthetic=True)
    step, target = training_step(recipe, Layout.of(recipe, 1), resident=False), parse("h100")
    assert step.exact
    bodies = [program.exported(target.chip) for program in step.programs]
    request = _requests(target, step, bodies)[0]
    ((_, answer),) = compile_each([dataclasses.replace(request, text=True)])
    assert answer.problem is None and answer.hlo.count('custom_call_target="__cublas') > 20
    assert misaligned(answer.hlo) == set()
