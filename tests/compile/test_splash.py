import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jaxlib import _hlo

from chipwise.chips import CHIPS
from chipwise.compile.hlo import tpu
from chipwise.compile.hlo.proto import parse
from chipwise.compile.hlo.splash import TABLE, Splash
from chipwise.models.chip_traits import ChipTraits

KERNEL = "jit(f)/{scope}/jit(_splash_attention)/splash_mha_{kernel}_residuals/pallas_call"
V6E = "TPU v6e (Trillium)"


FORWARD = KERNEL.format(scope="jvp()", kernel="fwd")


def module(operands, source=FORWARD):
    """A program of one call with `operands`, such as "bf16[4,2048,128]"."""
    arrays = [f"{a}{{{','.join(str(i) for i in reversed(range(a.count(',') + 1)))}}}" for a in operands]
    lines = [f"  %p{i} = {a} parameter({i})" for i, a in enumerate(arrays)]
    given = ", ".join(f"%p{i}" for i in range(len(arrays)))
    call = f'custom-call({given}), custom_call_target="tpu_custom_call", metadata={{op_name="{source}"}}'
    types = ", ".join(f"p{i}: {a}" for i, a in enumerate(operands))
    text = "\n".join(
        [
            "HloModule m, is_scheduled=true\n",
            f"ENTRY %main ({types}) -> bf16[8] {{",
            *lines,
            f"  ROOT %call = bf16[8]{{0}} {call}",
            "}",
        ]
    )
    return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def called(operands, **source):
    entry = parse(module(operands, KERNEL.format(**source))).entry
    return Splash.of(next(op for op in entry.instructions.values() if op.opcode == "custom-call"))


def test_a_kernel_by_its_name_and_operands():
    operands = ["s8[1,4,4]", "s8[1,4,4]", "bf16[3,8,2048,64]", "bf16[3,2,2048,64]", "bf16[3,2,2048,64]"]
    found = called(operands, scope="transpose(jvp(attention[0.6250]))", kernel="dkv")
    assert found == Splash("dkv", 24, 2048, 2048, 64, 0.625, 512, 16)
    assert found.flops == 4 * 2 * 24 * 2048 * 2048 * 64 * 0.625


def test_a_single_sequence_has_no_axis_for_it():
    many = ["s8[1,4,4]", "bf16[2,8,2048,128]", "bf16[2,2,2048,128]", "bf16[2,2,2048,128]", "s32[2048,128]"]
    one = ["s8[1,4,4]", "bf16[8,2048,128]", "bf16[2,2048,128]", "bf16[2,2048,128]", "s32[2048,128]"]
    pair = [called(operands, scope="jvp()", kernel="fwd") for operands in (many, one)]
    assert pair[0].flops == 2 * pair[1].flops
    assert pair[0].cycles(V6E) == pytest.approx(2 * pair[1].cycles(V6E))


@pytest.mark.parametrize(
    "scope, first, last, share",
    [
        ("attention[0.4000]", "s8[1,4,4]", "s32[2048,128]", 0.4),
        ("jvp()", "s8[1,4,4]", "s32[2048,128]", 5 / 8),  # called by a net itself, with a causal mask
        ("jvp()", "s8[1,4,4]", "bf16[8,2048,128]", 1.0),  # no positions, so no mask
        ("jvp()", "bf16[8,2048,128]", "bf16[8,2048,128]", 1.0),
    ],
)
def test_the_share_of_blocks_that_it_visits(scope, first, last, share):
    found = called([first, *["bf16[8,2048,128]"] * 3, last], scope=scope, kernel="dq")
    assert (found.share, found.block, found.steps) == (share, 512, 16)


def test_a_window_shortens_the_loop_not_the_blocks():
    operands = ["s8[1,8,2]", *["bf16[8,2048,128]"] * 3, "s32[2048,128]"]
    found = called(operands, scope="attention[0.2344]", kernel="fwd")
    assert (found.block, found.steps) == (256, 16)


@pytest.mark.parametrize("source", ["jit(f)/pallas_call", FORWARD.replace("_fwd_", "_other_")])
def test_other_calls_are_not_known(source):
    program = module(["s8[1,4,4]", *["bf16[8,2048,128]"] * 3], source)
    found = tpu.read(program, chip=V6E)
    assert [note.code for note in found.notes] == ["program-custom-call"]
    assert not found.product_flops and not found.seconds


def test_its_time_is_in_the_reading():
    operands = ["s8[1,4,4]", *["bf16[8,2048,128]"] * 3]
    found = tpu.read(module(operands), clock_GHz=1.75, memory_GBps=1638, chip=V6E)
    (kernel,) = found.kernels
    splash = called(operands, scope="jvp()", kernel="fwd")
    assert (kernel.kind, kernel.bound, kernel.flops) == ("attention", "compute", splash.flops)
    assert kernel.seconds == pytest.approx(splash.cycles(V6E) / 1.75e9)
    assert not found.notes


with TABLE.open(encoding="utf-8", newline="") as file:
    TABLED = {
        (row["chip"], row["kernel"], row["size"], row["block"]): [
            int(row[n]) for n in ("step", "line", "visible")
        ]
        for row in csv.DictReader(file)
    }


@pytest.mark.parametrize("chip, cores", [("TPU v5e", 1), ("TPU v5p", 2), (V6E, 1), ("TPU7x (Ironwood)", 1)])
def test_cycles_are_of_steps_lines_and_visible_blocks(chip, cores):
    step, line, visible = TABLED[chip, "fwd", "128", "512"]
    found = Splash("fwd", 8, 4096, 2048, 128, 0.75, 512, 20)
    assert found.cycles(chip) == 8 * (20 * step + 8 * line + 24 * visible) / cores
    found = Splash("dkv", 8, 4096, 2048, 128, 0.75, 512, 20)
    step, line, visible = TABLED[chip, "dkv", "128", "512"]
    assert found.cycles(chip) == 8 * (20 * step + 4 * line + 24 * visible) / cores


def test_between_the_sizes_of_the_table():
    def of(size, block, steps):
        return Splash("fwd", 1, 2048, 2048, size, 1.0, block, steps).cycles(V6E)

    assert of(96, 512, 16) == of(128, 512, 16)
    assert of(512, 512, 16) > 1.5 * of(256, 512, 16)
    step, line, visible = TABLED[V6E, "fwd", "128", "1024"]
    assert of(128, 2048, 1) == step + 2 * line + 4 * visible
    step, line, visible = TABLED[V6E, "fwd", "128", "256"]
    assert of(128, 128, 256) == pytest.approx(256 * step + 8 * line + 64 * visible)


def test_every_tpu_that_runs_it_is_in_the_table():
    chips = [chip for chip in CHIPS if chip.kind == "TPU" and ChipTraits.of(chip).fuses]
    assert len(chips) >= 5
    for chip in chips:
        for kernel in ("fwd", "dq", "dkv"):
            share = [Splash(kernel, 1, n, n, 128, 1.0, 512, n * n >> 18) for n in (512, 2048, 8192)]
            times = [one.flops / one.cycles(chip.name) * chip.clock_GHz for one in share]
            peak = 1e3 * chip.bf16_dense_tflops / chip.jax_devices_per_chip
            assert 0.15 * peak < times[0] < times[1] < times[2] <= peak


@pytest.mark.slow
def test_the_table_is_what_the_compiler_schedules():
    script = Path(__file__).parents[2] / "benchmarks/splash.py"
    code = (
        f"import runpy, json; print(json.dumps(runpy.run_path({str(script)!r})['cycles']('v5e-1', 64, 256)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=dict(os.environ))
    found = json.loads(run.stdout)
    assert found == {kernel: TABLED["TPU v5e", kernel, "64", "256"] for kernel in found} and len(found) == 3
