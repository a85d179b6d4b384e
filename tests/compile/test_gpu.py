"""The excerpts `hlo/gpu_*` are what XLA of jax 0.10.2 makes for GPUs that are not here, with training's
options; XLA's own parser makes the module that a plan reads."""

import re
from pathlib import Path

import pytest
from jaxlib import _hlo

from chipwise.base.facts import fact
from chipwise.compile.hlo import gpu, proto

EXCERPTS = Path(__file__).parent / "excerpts"


def read(name):
    return parsed((EXCERPTS / f"gpu_{name}.txt").read_text(encoding="utf-8"))


def parsed(text):
    return gpu.read(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())


def of_kind(reading, kind):
    return [kernel for kernel in reading.kernels if kernel.kind == kind]


def test_a_loop_runs_its_kernels_once_a_trip_and_names_the_line():
    (product,) = of_kind(read("scan_a100"), "matmul")
    assert (product.count, product.flops, product.shape) == (7, 2 * 256**3, (256, 256, 256, 1))
    assert product.bytes == 3 * 2 * 256**2  # without the library's workspace
    assert product.line == "/home/user/net.py:25" and product.dtype == "bf16"


def test_products_that_the_compiler_computes_again_to_save_memory_are_told():
    text = (EXCERPTS / "gpu_scan_a100.txt").read_text(encoding="utf-8")
    (product,) = of_kind(parsed(text), "matmul")
    assert parsed(text).notes == []
    (note,) = parsed(re.sub(rf"%{re.escape(product.name)}\b(?!\.)", f"%{product.name}.remat2", text)).notes
    assert note.code == "program-remat" and note["share"] == 1


SORT = """HloModule sorted, is_scheduled=true
%less (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = pred[] compare(%a, %b), direction=LT
}}
ENTRY %main (x: s32[{n}]) -> s32[{n}] {{
  %x = s32[{n}]{{0}} parameter(0)
  ROOT %sort.1 = s32[{n}]{{0}} sort(%x), dimensions={{0}}, to_apply=%less
}}"""


def test_a_small_sort_is_only_its_bytes():
    small, large = (parsed(SORT.format(n=n)) for n in (8, 1 << 20))
    assert small.notes == [] and small.bytes == 64
    assert large.notes == [fact("program-sort", shape="s32[1048576]")]


def test_a_convolution_and_its_gradients_do_equal_work():
    made = of_kind(read("convolution_h100"), "convolution")
    forward, kernel, inputs = made
    assert {k.flops for k in made} == {2 * 8 * 16 * 16 * 64 * 128 * 9}
    assert {k.window for k in made} == {(3, 3, 2, 2)}
    assert forward.shape == (8 * 16 * 16, 128, 9 * 64, 1)
    assert kernel.shape == (9 * 64, 128, 8 * 16 * 16, 1)
    assert inputs.shape[:2] == (8 * 33 * 33, 64)  # of the padded image, of which each pixel meets a few taps
    for k in made:
        m, n, inner, groups = k.shape
        assert 2 * m * n * inner * groups == pytest.approx(k.flops, rel=0.01)


def test_bfloat16_on_a_v100_is_float32():
    reading = read("product_v100")
    (product,) = of_kind(reading, "matmul")
    assert product.dtype != "bf16" and product.bytes == 4 * (512 * 1024 + 1024 * 256 + 512 * 256)
    assert len(of_kind(reading, "elementwise")) == 3  # two conversions and the rectifier


def test_what_float32_multiplies_in_is_what_the_program_asks_for():
    assert [k.dtype for k in of_kind(read("precisions_a100"), "matmul")] == ["f32", "tf32"]


def test_fused_attention_behind_a_causal_mask_does_half():
    forward, backward = of_kind(read("attention_h100"), "attention")
    assert forward.flops == 2 * 2 * (2 * 4) * 256 * 256 * 64 / 2
    assert backward.flops == 2.5 * forward.flops
    assert forward.bytes < 5 * 2 * (2 * 256 * 4 * 64) and read("attention_h100").notes == []


def test_a_collective_runs_beside_what_is_scheduled_before_it_is_awaited():
    one, two = of_kind(read("gathered_h100"), "collective")
    assert (one.name, one.count, one.bytes) == ("all-gather", 3, 7 / 8 * 2 * 2048 * 8192)
    assert one.beside == ("loop_dynamic_slice_fusion.1",)
    assert two.beside == ("custom-call.2", "loop_multiply_fusion")


def test_a_collective_that_the_compiler_left_in_line_runs_alone():
    text = (EXCERPTS / "gpu_gathered_h100.txt").read_text(encoding="utf-8").replace(":false", ":true")
    assert [kernel.beside for kernel in of_kind(parsed(text), "collective")] == [(), ()]


def test_a_collective_in_a_computation_of_its_own_runs_beside_the_rest():
    text = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[1024], y: f32[64,64]) -> (f32[256], f32[64,64]) {
  %x = f32[1024]{0} parameter(0)
  %y = f32[64,64]{1,0} parameter(1)
  %before = f32[64,64]{1,0} negate(%y)
  %rs = ((f32[1024]{0}), f32[256]{0}) reduce-scatter-start(%x), replica_groups={{0,1,2,3}},
    dimensions={0}, to_apply=%add
  %during = f32[64,64]{1,0} negate(%before)
  %done = f32[256]{0} reduce-scatter-done(%rs)
  %after = f32[64,64]{1,0} negate(%during)
  ROOT %t = (f32[256]{0}, f32[64,64]{1,0}) tuple(%done, %after)
}
"""
    (one,) = of_kind(parsed(text), "collective")
    assert (one.name, one.bytes, one.beside) == ("reduce-scatter", 0.75 * 4096, ("during",))


def test_no_program_is_an_error():
    with pytest.raises(ValueError):
        gpu.read(b"\x0a\x03abc")


def test_the_planner_s_own_lines_are_not_the_user_s():
    text = (EXCERPTS / "gpu_scan_a100.txt").read_text(encoding="utf-8")
    exporting = str(Path(proto.__file__).parents[2] / "planner" / "exporting.py")
    assert of_kind(parsed(text.replace("/home/user/net.py", exporting)), "matmul")[0].line == ""
    engine = str(Path(proto.__file__).parents[2] / "step" / "flat.py")
    moved = of_kind(parsed(text.replace("/home/user/net.py", engine)), "matmul")[0].line
    assert moved == f"{engine}:25"


SLICED = """HloModule sliced, is_scheduled=true

%fused (flat: f32[1000], x: f32[8,10]) -> bf16[8,10] {
  %flat = f32[1000]{0} parameter(0)
  %half = bf16[1000]{0} convert(%flat)
  %bias = bf16[10]{0} slice(%half), slice={[20:30]}
  %rows = bf16[8,10]{1,0} broadcast(%bias), dimensions={1}
  %x = f32[8,10]{1,0} parameter(1)
  %low = bf16[8,10]{1,0} convert(%x)
  ROOT %sum = bf16[8,10]{1,0} add(%low, %rows)
}

ENTRY %main (flat: f32[1000], x: f32[8,10]) -> bf16[8,10] {
  %flat = f32[1000]{0} parameter(0)
  %x = f32[8,10]{1,0} parameter(1)
  ROOT %fusion = bf16[8,10]{1,0} fusion(%flat, %x), kind=kLoop, calls=%fused
}
"""


def test_of_a_converted_array_only_the_part_counts_that_is_sliced_from_it():
    (kernel,) = parsed(SLICED).kernels
    assert kernel.bytes == 10 * 4 + 80 * 4 + 80 * 2
    assert kernel.work == 10 + 80 + 80  # two conversions and the sum


def test_what_a_slice_and_another_need_is_read_once():
    both, root = "(bf16[8,10], bf16[1000])", "ROOT %sum = bf16[8,10]{1,0} add(%low, %rows)"
    text = SLICED.replace("-> bf16[8,10]", f"-> {both}").replace("bf16[8,10]{1,0} fusion", f"{both} fusion")
    text = text.replace(root, f"{root[5:]}\n  ROOT %both = {both} tuple(%sum, %half)")
    (kernel,) = parsed(text).kernels
    assert kernel.bytes == 1000 * 4 + 80 * 4 + 80 * 2 + 1000 * 2
    assert kernel.work == 1000 + 80 + 80
