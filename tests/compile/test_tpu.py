"""The excerpts in `excerpts/` are of libtpu 0.0.42, without locations and with cycles as the only cost.

They are kept as text for people; XLA's own parser makes the module that a plan reads.
"""

import collections
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jaxlib import _hlo

from chipwise.base.facts import fact
from chipwise.compile.hlo import proto, tpu

EXCERPTS = Path(__file__).parent / "excerpts"


def text(name):
    return (EXCERPTS / f"{name}.txt").read_text(encoding="utf-8")


def program(text):
    """The module that a text describes, as an executable hands it out."""
    return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def read(name, **chip):
    return tpu.read(program(text(name)), **chip)


def by_kind(found, figure="seconds"):
    """The cycles of the kernels, which are their nanoseconds at 1 GHz, or the sum of another figure."""
    sums = collections.defaultdict(float)
    for kernel in found.kernels:
        value = kernel.seconds * 1e9 if figure == "seconds" else kernel.count * getattr(kernel, figure)
        sums[kernel.kind] += value
    return {kind: round(value) for kind, value in sums.items()}


def cycles(found):
    return round(found.seconds * 1e9)


def test_a_product_and_what_is_fetched_for_it():
    found = read("product_v5e", clock_GHz=1.5, memory_GBps=819)
    assert by_kind(read("product_v5e")) == {"matmul": 1083068}
    assert found.product_flops == 2 * 4096**3
    # one operand is fetched by a copy beside, the other by the product, which writes the result to HBM
    assert found.bytes == 3 * 2 * 4096**2
    assert found.seconds == pytest.approx(1083068 / 1.5e9)
    assert found.notes == []


def test_nested_loops_are_multiplied_out():
    found = read("loops_v5e")
    assert cycles(found) == 5 * (3 * (10453 + 80) + 4140)
    assert found.product_flops == 15 * 2 * 512**3
    assert found.notes == []


def test_a_scan_whose_counter_is_copied():
    found = read("scan_tpu7x")
    assert cycles(found) == 7 * (2964 + 4868) + 3554 + 39541 + 2920
    assert found.product_flops == 7 * 2 * 256 * 1024**2


def test_a_loop_that_depends_on_data_is_counted_once_and_said():
    found = read("loop_on_data_v5e")
    assert found.product_flops == 2 * 512**3
    assert found.notes == [fact("program-loop-on-data", source="jit(<lambda>)/while")]


@pytest.mark.parametrize(
    ("counter", "limit", "direction", "step", "runs"),
    [(0, 7, "LT", 1, 7), (0, 7, "LE", 1, 8), (7, 0, "GT", -1, 7), (1, 8, "LT", 3, 3), (5, 5, "LT", 1, 0)],
)
def test_trip_counts(counter, limit, direction, step, runs):
    loop = f"""HloModule m, is_scheduled=true

%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %b = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[8] get-tuple-element(%b), index=1
  %by = s32[] constant({step})
  %next = s32[] add(%by, %i)
  %y = f32[8] sine(%x), backend_config={{"window_config":{{"estimated_cycles":"10"}}}}
  ROOT %r = (s32[], f32[8]) tuple(%next, %y)
}}

%condition (c: (s32[], f32[8])) -> pred[] {{
  %c = (s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant({limit})
  ROOT %lt = pred[] compare(%j, %n), direction={direction}
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x.1 = f32[8] parameter(0)
  %zero = s32[] constant({counter})
  %t = (s32[], f32[8]) tuple(%zero, %x.1)
  %w = (s32[], f32[8]) while(%t), condition=%condition, body=%body
  ROOT %out = f32[8] get-tuple-element(%w), index=1
}}
"""
    assert cycles(tpu.read(program(loop))) == 10 * runs
    stated = loop.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"4"}}')
    assert cycles(tpu.read(program(stated))) == 40


def test_of_branches_the_longest_counts():
    found = read("conditional_v5e")
    assert by_kind(found) == {"matmul": 31668}
    assert found.product_flops == 2 * 1024**3


def test_a_gather_has_no_cycles_but_moves_bytes():
    found = read("gather_v5e", clock_GHz=1.5, memory_GBps=819)
    rows = 65536 * 1024 * 4
    assert cycles(read("gather_v5e")) == 2477
    assert by_kind(found, "bytes")["other"] == pytest.approx(2 * rows, rel=0.01)
    assert by_kind(found)["other"] == pytest.approx(2 * rows / 819, rel=0.01)


def test_the_sentinel_of_a_sparsecore_is_dropped():
    assert "9223372036854775807" in text("sparsecore_tpu7x")
    found = read("sparsecore_tpu7x", clock_GHz=2.2, memory_GBps=3690)
    assert cycles(read("sparsecore_tpu7x")) == 2694
    assert found.seconds == pytest.approx(2 * 65536 * 1024 * 4 / 3690e9, rel=0.02)


def test_a_sort_is_said_to_be_unknown():
    found = read("sort_v5e")
    assert found.notes == [fact("program-sort", shape="f32[64,8192]")]


def test_a_callback_is_said():
    found = read("callback_v5e")
    assert found.notes == [fact("program-host-transfer", source="jit(<lambda>)/debug_print")]


def test_kinds_of_what_is_fused():
    assert by_kind(read("softmax_v5e")) == {"reduce": 2021408 + 1209536, "elementwise": 1227312}
    assert by_kind(read("convolution_v5e")) == {"convolution": 592307}
    assert by_kind(read("batched_product_v2")) == {"matmul": 1436544}


def test_a_fill_only_writes():
    filled = "HloModule m, is_scheduled=true\n\nENTRY %main () -> f32[8,128] {\n  %zero = f32[] constant(0)\n"
    filled += "  ROOT %fill = f32[8,128]{1,0:T(8,128)} broadcast(%zero), dimensions={}\n}\n"
    assert tpu.read(program(filled)).bytes == 4 + 4 * 8 * 128


def test_products_are_told_from_convolutions_without_their_names():
    for name, kind in [("product_v5e", "matmul"), ("convolution_v5e", "convolution")]:
        nameless = re.sub(r", metadata=\{[^}]*\}", "", text(name))
        assert set(by_kind(tpu.read(program(nameless)))) == {kind}
    nameless = re.sub(r", metadata=\{[^}]*\}", "", text("batched_product_v2"))
    assert set(by_kind(tpu.read(program(nameless)))) == {"matmul"}


def test_flops_of_convolutions_leave_out_the_border():
    # 3 x 3 over 56 x 56 with a border of zeros: 3 * 56 - 2 pairs of position and tap a dimension
    assert read("convolution_v5e").product_flops == 2 * 128 * 64 * 64 * (3 * 56 - 2) ** 2
    # batch dimensions that stand as spatial ones
    assert read("batched_product_v2").product_flops == 2 * 8 * 12 * 1024**2 * 64


def test_padding_waste_is_noted():
    narrow = text("product_v5e").replace("4096,4096", "4096,65").replace("(8,128)(2,1)S(1)", "(8,128)(2,1)")
    (note,) = tpu.read(program(narrow)).notes
    assert note.code == "program-padding" and note["share"] == pytest.approx(1 - 65 / 128)
    assert note["shape"] == "bf16[4096,65]"


@pytest.mark.parametrize(
    ("line", "whole"),
    [
        ("f32[1000]{0:T(1024)} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add", 1.5 * 4000),
        ("f32[1000]{0:T(1024)} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add", 1.5 * 4000),
        ("f32[1000]{0:T(1024)} all-reduce(%x), replica_groups={}, to_apply=%add", 2 * 7 / 8 * 4000),
        ("f32[4000]{0:T(1024)} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}", 0.75 * 16000),
        (
            "f32[250]{0:T(1024)} reduce-scatter(%x), replica_groups={{0,1,2,3}}, dimensions={0}, "
            "to_apply=%add",
            0.75 * 4000,
        ),
        ("f32[1000]{0:T(1024)} all-to-all(%x), replica_groups={{0,1,2,3}}, dimensions={0}", 0.75 * 4000),
        ("f32[1000]{0:T(1024)} collective-permute(%x), source_target_pairs={{0,1},{1,0}}", 4000),
        (
            "(f32[1000]{0:T(1024)}, f32[4000]{0:T(1024)}) all-gather-start(%x), replica_groups={{0,1,2,3}}, "
            "dimensions={0}",
            0.75 * 16000,
        ),
    ],
)
def test_wire_bytes(line, whole):
    done = "\n  %d = f32[4000] all-gather-done(%c)" if "-start" in line else ""
    out = "f32[4000]" if done else line.partition("{")[0]
    added = "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
    module = program(
        f"HloModule m, is_scheduled=true\n\n{added}  ROOT %s = f32[] add(%a, %b)\n}}\n\n"
        f"ENTRY %main (x: f32[1000]) -> {out} {{\n"
        f"  %x = f32[1000]{{0:T(1024)}} parameter(0)\n  %c = {line}{done}\n}}\n"
    )
    devices = bytes([15 << 3 | 2, 4, 1 << 3, 1, 2 << 3, 8])  # `device_assignment`: 1 replica, 8 partitions
    assert tpu.read(module + devices).wire_bytes == pytest.approx(whole)


def test_a_collective_in_three_fusions_is_sent_once_beside_the_product_that_moves_it_on():
    reading = read("gathered_v5e")
    whole = 2 * 1024 * 4096
    assert reading.wire_bytes == pytest.approx(3 * 2 * 7 / 8 * whole) and not reading.notes
    alone, hidden = (kernel for kernel in reading.kernels if kernel.kind == "collective")
    assert (alone.count, alone.beside, hidden.beside) == (3, (), ("fusion.25",))
    products = [kernel for kernel in reading.kernels if kernel.kind == "matmul"]
    assert [kernel.name for kernel in products] == ["fusion.25", "fusion.23"]
    assert reading.product_flops == 3 * 2 * 2 * 4096 * 1024 * 4096
    assert all(kernel.seconds for kernel in products)


def test_bytes_count_padding_memory_and_slices():
    module = """HloModule m, is_scheduled=true

%taking (p: f32[100,8,128], i: s32[]) -> f32[8,128] {
  %p = f32[100,8,128]{2,1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  %s = f32[1,8,128]{2,1,0:T(8,128)} dynamic-slice(%p, %i, %i, %i), dynamic_slice_sizes={1,8,128}
  ROOT %b = f32[8,128]{1,0:T(8,128)} bitcast(%s)
}

%putting (p: f32[100,8,128], u: f32[1,8,128], i: s32[]) -> f32[100,8,128] {
  %p = f32[100,8,128]{2,1,0:T(8,128)} parameter(0)
  %u = f32[1,8,128]{2,1,0:T(8,128)} parameter(1)
  %i = s32[]{:T(128)S(6)} parameter(2)
  ROOT %d = f32[100,8,128]{2,1,0:T(8,128)} dynamic-update-slice(%p, %u, %i, %i, %i)
}

ENTRY %main (p: f32[100,8,128], i: s32[], q: f32[8,65]) -> f32[100,8,128] {
  %p = f32[100,8,128]{2,1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  %q = f32[8,65]{1,0:T(8,128)} parameter(2)
  %slice = f32[8,128]{1,0:T(8,128)S(1)} fusion(%p, %i), kind=kLoop, calls=%taking
  %row = f32[1,8,128]{2,1,0:T(8,128)S(1)} bitcast(%slice)
  %padded = f32[8,65]{1,0:T(8,128)S(1)} sine(%q)
  ROOT %put = f32[100,8,128]{2,1,0:T(8,128)} fusion(%p, %row, %i), kind=kLoop, calls=%putting
}
"""
    row = 8 * 128 * 4
    found = tpu.read(program(module), clock_GHz=1.0, memory_GBps=1.0)
    assert by_kind(found, "bytes") == {"copy": 2 * row, "elementwise": row}
    assert found.seconds == pytest.approx(3 * row / 1e9)
    assert cycles(tpu.read(program(module))) == 0


def test_a_copy_that_turns_an_array_is_bound_by_that_and_room_for_one_costs_nothing():
    tile, cycles = "T(8,128)(2,1)", 'backend_config={"window_config":{"estimated_cycles":"9000000"}}'
    module = program(f"""HloModule m, is_scheduled=true

ENTRY %main (x: bf16[512,1,256]) -> bf16[9] {{
  %x = bf16[512,1,256]{{2,1,0:{tile}}} parameter(0)
  %turned = bf16[512,1,256]{{0,1,2:{tile}}} copy(%x), {cycles}
  %moved = bf16[512,1,256]{{1,2,0:{tile}}} copy(%x), {cycles}
  %across = bf16[256,512,1]{{1,2,0:{tile}}} transpose(%x), dimensions={{2,0,1}}, {cycles}
  %along = bf16[256,512,1]{{0,2,1:{tile}}} transpose(%x), dimensions={{2,0,1}}, {cycles}
  %room = bf16[512,512,256]{{2,1,0:{tile}}} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %r = bf16[9]{{0:{tile}}} custom-call(), custom_call_target="AllocateBuffer"
}}
""")
    found = tpu.read(module, clock_GHz=1.0, memory_GBps=1000)
    bounds = {kernel.name: kernel.bound for kernel in found.kernels}
    assert bounds == {"turned": "compute", "moved": "memory", "across": "compute", "along": "memory"}


def test_shapes():
    module = proto.parse(
        program("""HloModule m, is_scheduled=true

ENTRY %main (x: bf16[8,56,56,64]) -> (pred[], s4[3], bf16[8,56,56,64]) {
  %x = bf16[8,56,56,64]{0,3,2,1:T(8,128)(2,1)S(1)} parameter(0)
  %t = pred[] constant(true)
  %n = s4[3]{0} constant({1, 2, 3})
  ROOT %r = (pred[], s4[3]{0}, bf16[8,56,56,64]{0,3,2,1:T(8,128)(2,1)S(1)}) tuple(%t, %n, %x)
}
""")
    )
    shape = module.entry.root.operands[2].shapes[0]
    assert (shape.memory, shape.tile, shape.bits) == (1, (8, 128), 16)
    assert shape.padded_elements == 56 * 56 * 64 * 128 and shape.elements == math.prod((8, 56, 56, 64))
    assert [str(s) for s in module.entry.root.shapes] == ["pred[]", "s4[3]", "bf16[8,56,56,64]"]


def test_the_program_of_an_executable():
    compiled = jax.jit(lambda x: jnp.sin(x @ x)).lower(jnp.ones((64, 64))).compile()
    module = proto.parse(proto.program_bytes(compiled))
    assert module.name == "jit__lambda" and module.devices == 1
    made = [op for computation in module.computations.values() for op in computation.instructions.values()]
    assert any(op.source.endswith("dot_general") and op.shapes[0].dims == (64, 64) for op in made)


@pytest.mark.parametrize("other", [b"", b"HloModule text"])
def test_other_bytes_are_refused(other):
    with pytest.raises(ValueError):
        tpu.read(other)


# ---- kernels


@pytest.mark.parametrize("name", ["scan_tpu7x", "convolution_v5e", "conditional_v5e"])
def test_the_kernels_take_the_whole_time(name):
    reading = read(name, clock_GHz=1.5, memory_GBps=800)
    assert sum(k.seconds for k in reading.kernels) == pytest.approx(reading.seconds)
    assert sum(k.count * k.flops for k in reading.kernels) == pytest.approx(reading.product_flops)
    assert all(k.bound and k.count >= 1 for k in reading.kernels)
