"""Programs of a GPU or of a group, traced for chips that are not here."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src import dispatch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from chipwise.chips.targets import parse
from chipwise.compile import exports
from chipwise.compile.answers import Answer
from chipwise.compile.exports import cudnn_assumed, export_program
from chipwise.models import chip_traits
from chipwise.models.attention import attention
from chipwise.models.chip_traits import traced_for
from chipwise.models.large import SHARD, abstract_mesh, fsdp, in_group
from chipwise.planner import compile_step
from chipwise.step.program import Program

MESH = abstract_mesh(2)


def own(_, q):
    return attention(q, q, q, causal=True)


def gradient(in_layer):
    def loss(q):
        return jnp.sum((fsdp(own, (), q) if in_layer else own((), q)).astype(jnp.float32))

    def traced(q):
        with traced_for(parse("h100").chip), in_group(MESH):
            return jax.grad(loss)(q)

    return traced


def rows(mesh):
    return jax.ShapeDtypeStruct((4, 256, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P(SHARD)))


@pytest.mark.parametrize("in_layer", [True, False])
def test_a_device_of_a_group_calls_the_gpu_s_own_attention_with_its_rows(in_layer):
    needing = set(dispatch.prim_requires_devices_during_lowering)
    made = export_program(gradient(in_layer), [rows(MESH)], "cuda")
    assert dispatch.prim_requires_devices_during_lowering == needing
    calls = [
        line for line in export.deserialize(bytearray(made.body)).mlir_module().splitlines() if "fmha" in line
    ]
    assert len(calls) == 2 and all("tensor<2x256x2x64xbf16>" in line for line in calls)


def test_a_gpu_alone_calls_its_own_attention():
    def traced(q):
        with traced_for(parse("h100").chip):
            return jax.grad(lambda q: jnp.sum(own((), q).astype(jnp.float32)))(q)

    made = export_program(traced, [jax.ShapeDtypeStruct((4, 256, 2, 64), jnp.bfloat16)], "cuda")
    text = export.deserialize(bytearray(made.body)).mlir_module()
    assert text.count("__cudnn$fmha") == 2 and "CustomSPMDPartitioning" not in text


@pytest.mark.parametrize("in_layer", [True, False])
def test_devices_that_are_here_are_given_the_same_calls(in_layer):
    mesh = Mesh(np.asarray(jax.devices()[:2]), (SHARD,))
    with cudnn_assumed(in_group=True):
        lowered = jax.jit(gradient(in_layer)).trace(rows(mesh)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("__cudnn$fmha") == 2 and "CustomSPMDPartitioning" not in text


@pytest.fixture
def traces(monkeypatch):
    """A function of a program's body and chips: how often the body is traced for a plan of all of them."""
    monkeypatch.setattr(chip_traits, "_ASKED", set())
    monkeypatch.setitem(compile_step.COMPILERS, "cuda", lambda: None)

    def answered(requests, **_):
        return ((i, Answer(one.name)) for i, one in enumerate(requests))

    monkeypatch.setattr(compile_step, "compile_each", answered)
    monkeypatch.setattr(compile_step, "begin_if_missing", lambda *_: None)

    def count(body, *chips):
        traced = []

        def function(x):
            traced.append(body(x))
            return traced[-1]

        program = Program("replica", jax.jit(function), (jax.ShapeDtypeStruct((8,), jnp.float32),))
        recipe = types.SimpleNamespace(precision="f32")
        programs = types.SimpleNamespace(
            programs=(program,), recipe=recipe, exchanges={}, exact=True, shards=1
        )
        cases = [(parse(chip), programs) for chip in chips]
        assert sorted(i for i, _ in compile_step.compile_steps(cases)) == list(range(len(chips)))
        contents = program.contents(parse(chips[0]).chip)
        assert contents.dtypes == {"float32"} and contents.operations > 0
        return len(traced)

    return count


def test_chips_of_a_platform_share_a_trace(traces):
    assert traces(lambda x: x * 2, "a100", "t4", "h100", "v100") == 1


def test_chips_with_other_kernels_have_their_own(traces):
    def body(x):
        return x * (2.0 if chip_traits.traits().fuses else 3.0)

    assert traces(body, "a100", "t4", "h100", "v100") == 2


def test_contents_of_a_chip_without_a_compiler_need_no_cudnn(monkeypatch):
    """Then nothing was exported: the catalogue lacks figures of the chip, or its compiler is missing."""

    def refuse():
        raise RuntimeError("cuDNN is not detected")

    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", refuse)
    q = jax.ShapeDtypeStruct((4, 256, 2, 64), jnp.bfloat16)
    program = Program("replica", lambda q: own((), q), (q,))
    assert "bfloat16" in program.contents(parse("h100-nvl").chip).dtypes


def test_traces_of_other_shapes_are_forgotten_now_and_then(monkeypatch):
    """JAX keeps them for ever. Seen by a function of the process, which is traced again after that."""
    monkeypatch.setattr(exports, "MOST_TRACED", 3)
    monkeypatch.setattr(exports, "_EXPORTED", [])
    traced = []
    known = jax.jit(lambda x: traced.append(x.shape) or x + 1)

    def after(traces):
        for n in range(traces):
            export_program(jax.nn.relu, [jax.ShapeDtypeStruct((n + 2,), np.float32)], "cpu")
        exports.forget_traces()
        known(np.float32(1))
        return len(traced)

    assert [after(traces) for traces in (0, 2, 1, 0, 2, 1)] == [1, 1, 2, 2, 2, 3]
