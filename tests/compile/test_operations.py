from jaxlib import _hlo

from chipwise.compile.hlo import proto
from chipwise.compile.hlo.operations import moved, needed

TEXT = """HloModule nested, is_scheduled=true

%halved (flat: f32[4096]) -> bf16[4096] {
  %flat = f32[4096]{0:T(1024)} parameter(0)
  ROOT %half = bf16[4096]{0:T(1024)} convert(%flat)
}

%fused (flat: f32[4096], x: bf16[1024], kept: f32[8,1024]) -> (bf16[1024], f32[8,1024]) {
  %flat = f32[4096]{0:T(1024)} parameter(0)
  %half = bf16[4096]{0:T(1024)} fusion(%flat), kind=kLoop, calls=%halved
  %part = bf16[1024]{0:T(1024)} slice(%half), slice={[1024:2048]}
  %x = bf16[1024]{0:T(1024)} parameter(1)
  %sum = bf16[1024]{0:T(1024)} add(%part, %x)
  %row = f32[1024]{0:T(1024)} convert(%sum)
  %update = f32[1,1024]{1,0:T(8,128)} reshape(%row)
  %kept = f32[8,1024]{1,0:T(8,128)} parameter(2)
  %at = s32[] constant(3)
  %all = f32[8,1024]{1,0:T(8,128)} dynamic-update-slice(%kept, %update, %at, %at)
  ROOT %both = (bf16[1024], f32[8,1024]) tuple(%sum, %all)
}

ENTRY %main (flat: f32[4096], x: bf16[1024], kept: f32[8,1024]) -> (bf16[1024], f32[8,1024]) {
  %flat = f32[4096]{0:T(1024)} parameter(0)
  %x = bf16[1024]{0:T(1024)S(1)} parameter(1)
  %kept = f32[8,1024]{1,0:T(8,128)} parameter(2)
  ROOT %fusion = (bf16[1024]{0:T(1024)}, f32[8,1024]{1,0:T(8,128)}) fusion(%flat, %x, %kept), kind=kLoop,
    calls=%fused
}
"""


def fusion(text):
    return proto.parse(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()).entry.root


def by_name(op):
    return {part.name.removesuffix(".1"): count for part, count in needed(op.called[0])}


def test_a_fusion_reads_only_what_its_result_needs():
    op = fusion(TEXT)
    counts = by_name(op)
    assert counts["flat"] == counts["half"] == counts["part"] == 1024  # through the inner fusion
    assert counts["kept"] == 0 and counts["all"] == 8192
    update = 8 * 1024 * 4  # a row of a tile is padded to it
    assert moved(op) == 1024 * 4 + 1024 * 2 + update  # x is in memory of the chip


def test_what_no_result_needs_is_not_computed():
    unused = TEXT.replace("add(%part, %x)", "add(%x, %x)")
    assert by_name(fusion(unused))["flat"] == 0
