"""The model of GPUs and CPUs: physics that must hold whatever the fit says, and the fit's own record."""

import csv
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from chipwise.chips.catalogue import CHIPS, named
from chipwise.errors import DeviceError
from chipwise.planner import roofline, timing
from chipwise.planner.operations import Operation, Product, Traced, trace
from chipwise.planner.roofline import share_of_peak, time_on
from chipwise.planner.timing import all_reduce_seconds
from chipwise.words.facts import fact
from refusals import refused

GPUS = [chip for chip in CHIPS if chip.kind == "GPU" and chip.fp32_tflops is not None]


def product(m, n=None, k=None, dtype="bfloat16", count=1.0):
    n, k, size = n or m, k or m, 4 if dtype == "float32" else 2
    one = Product("matmul", m, n, k, 1, (k, n))
    return Traced((Operation("matmul", size * (m * k + k * n), size * m * n, dtype, one, count),))


def copy(nbytes):
    return Traced((Operation("elementwise", nbytes, nbytes, "float32", work=nbytes / 4),))


def seconds(traced, chip="a100", precision="bf16", **options):
    return time_on(traced, named(chip), precision, **options).seconds


# ---- physics


@pytest.mark.parametrize("chip", GPUS, ids=lambda chip: chip.names[0])
def test_nothing_is_faster_than_the_catalogue(chip):
    for precision, dtype, peak in (
        ("bf16", "bfloat16", chip.bf16_dense_tflops or chip.fp32_tflops),
        ("f32", "float32", chip.fp32_tflops),
    ):
        made = time_on(product(8192, dtype=dtype), chip, precision)
        share = 2 * 8192**3 / made.seconds / 1e12 / peak
        assert 0.1 < share < 1, (chip.name, precision, share)
    moved = time_on(copy(4e9), chip, "f32")
    assert 0.3 < 8e9 / moved.seconds / 1e9 / chip.memory_GBps < 1
    assert moved.bound == "memory"


@pytest.mark.parametrize("chip", ["t4", "v100", "a100", "h100", "3090"])
def test_more_work_is_never_faster(chip):
    for dtype, precision in (("bfloat16", "bf16"), ("float32", "tf32"), ("float32", "f32")):
        times = [
            seconds(product(m, dtype=dtype), chip, precision) for m in (64, 65, 127, 128, 500, 2048, 9000)
        ]
        assert times == sorted(times)
    assert seconds(copy(2e6), chip) < seconds(copy(2e8), chip)
    assert seconds(product(512, count=2.0), chip) == pytest.approx(2 * seconds(product(512), chip))


def test_faster_chips_are_never_slower_at_the_same_operation():
    for traced in (product(1000), product(8192), copy(1e6), copy(1e9)):
        for slow, fast in (
            ("t4", "v100"),
            ("v100", "a100"),
            ("a100", "a100-80gb"),
            ("a100-80gb", "h100"),
            ("h100", "h200"),
        ):
            assert seconds(traced, fast) <= seconds(traced, slow)


def test_what_the_chip_lacks_is_said_and_costs():
    old = time_on(product(4096), named("v100"), "bf16")
    assert old.notes == (fact("chip-without-matrix-units", chip="V100-SXM2", precision="bf16"),)
    assert old.seconds > 4 * time_on(product(4096), named("v100"), "fp16").seconds
    tf32 = time_on(product(4096, dtype="float32"), named("v100"), "tf32")
    assert tf32.notes == (fact("chip-without-matrix-units", chip="V100-SXM2", precision="TF32"),)
    assert seconds(product(4096, dtype="float32"), "a100", "tf32") < seconds(
        product(4096, dtype="float32"), "a100", "f32"
    )
    assert not time_on(product(4096), named("a100"), "bf16").notes


def test_odd_channels_are_padded_for_matrix_units_only():
    even, odd = product(4096, 4096, 4096), product(4096, 4096, 4096)
    three = dataclasses.replace(odd.operations[0].product, channels=(3, 4096))
    odd = Traced((dataclasses.replace(odd.operations[0], product=three),))
    assert seconds(odd) == pytest.approx(seconds(even) * 8 / 3, rel=0.05)
    assert seconds(odd, "v100", "bf16") == seconds(even, "v100", "bf16")


def test_small_kernels_are_bound_by_launches():
    made = time_on(
        trace(lambda x: jnp.sum(x @ x), jax.ShapeDtypeStruct((8, 8), jnp.float32)), named("a100"), "f32"
    )
    assert made.bound == "launch"
    wide = time_on(product(64), named("a100-80gb"), "bf16")
    known = time_on(product(8192), named("a100-80gb"), "bf16")
    assert wide.high / wide.seconds > known.high / known.seconds > 1


def test_interval_is_wider_where_nothing_was_measured():
    made = [time_on(product(8192), named(chip), "bf16") for chip in ("h100", "l4", "p100")]
    factors = [one.high / one.seconds for one in made]
    assert factors == sorted(set(factors))


def test_tiles_and_waves():
    full = share_of_peak(108 * 256, 128, 4096, 1, 108, "tensor")
    assert 0.9 < full < 1
    assert share_of_peak(109 * 256, 128, 4096, 1, 108, "tensor") < full  # a second wave for one tile
    assert share_of_peak(64, 64, 64, 1, 108, "tensor") < 0.02
    assert share_of_peak(64, 64, 2**16, 1, 108, "tensor") > 0.1  # a long sum is split


def test_software_and_fused_attention():
    traced = trace(
        lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True),
        jax.ShapeDtypeStruct((8, 1024, 16, 64), jnp.float32),
    )
    assert seconds(traced, "a100", "tf32", fused_attention=True) < seconds(traced, "a100", "tf32") / 2
    assert seconds(copy(1e9), software="tuned") < seconds(copy(1e9)) < seconds(copy(1e9), software="eager")


def test_unknown_figures_are_an_error_that_names_the_chip():
    with refused(DeviceError, "chip-without-peak", chip="H100-NVL-94GB"):
        time_on(product(64), named("h100-nvl"), "bf16")
    with refused(DeviceError, "chip-without-bandwidth", chip="CPU (generic)"):
        time_on(product(64), named("cpu"), "f32")


def test_this_hosts_cpu_can_be_measured():
    chip = roofline.host_cpu_chip()
    assert 1e-3 < chip.fp32_tflops < 100
    assert 0.1 < chip.memory_GBps < 10_000
    assert time_on(product(256, dtype="float32"), chip, "f32").seconds > 0


# ---- sums over devices


def test_all_reduce():
    a100, t4, v3 = named("a100"), named("t4"), named("v3")
    assert all_reduce_seconds(1e9, 1, a100) == 0
    eight = all_reduce_seconds(1e9, 8, a100)
    assert eight == pytest.approx(2 * 7 / 8 / (300 * timing.LINK_EFFICIENCY["NVLink"]), rel=0.02)
    assert all_reduce_seconds(1e9, 2, a100) < eight < all_reduce_seconds(1e9, 16, a100)
    assert all_reduce_seconds(1e9, 8, t4) > 10 * eight
    assert 0 < all_reduce_seconds(1e9, 8, v3) < 0.1
    with refused(DeviceError, "chip-without-interconnect"):
        all_reduce_seconds(1.0, 2, named("cpu"))


# ---- the fit


def test_efficiencies_are_well_formed_and_used(monkeypatch):
    fitted = roofline.efficiencies()
    values = fitted["values"]
    assert set(values) >= {"matmul", "convolution", "vector", "memory", "launch_seconds", "eager", "tuned"}
    for name in ("matmul", "convolution", "convolution_tf32", "vector", "depthwise", "memory"):
        assert 0 < values[name] < 1, name
    assert len(values) < len(fitted["rows"]) / 4
    assert (
        1
        < fitted["interval_90"]["known_chip"]
        < fitted["interval_90"]["other"]
        < fitted["interval_90"]["unlike"]
    )
    assert set(fitted["chips"]) <= {chip.name for chip in CHIPS}
    before = seconds(copy(1e9))
    monkeypatch.setattr(
        roofline, "efficiencies", lambda: {**fitted, "values": {**values, "memory": values["memory"] / 2}}
    )
    assert seconds(copy(1e9)) == pytest.approx(2 * before, rel=0.01)


def test_cross_validation_keeps_what_it_states():
    fitted = json.loads(Path(roofline.__file__).with_name("efficiencies.json").read_text(encoding="utf-8"))
    for name in ("family_left_out", "chip_left_out"):
        result = fitted["cross_validation"][name]
        assert result["median_error"] <= 0.2, name
        assert result["within_50_percent"] >= 0.9, name
        assert result["coverage_90"] >= 0.85, name


def test_fitted_rows_are_published_ones():
    table = Path(__file__).parents[2] / "benchmarks/plan_accuracy/published.csv"
    with table.open(encoding="utf-8") as lines:
        published = {int(cells["row"]): cells for cells in csv.DictReader(lines)}
    for row in roofline.efficiencies()["rows"]:
        assert published[row["line"]]["model"].removeprefix("timm ") == row["model"]
