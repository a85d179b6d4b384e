"""From kernels to seconds: never faster than the catalogue, never faster for more work."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chipwise.base.errors import DeviceError
from chipwise.chips.catalogue import CHIPS, named
from chipwise.chips.gpus import GENERATIONS, NEEDED, compiled_as, target_config
from chipwise.compile import time_gpu, time_links
from chipwise.compile.hlo.kernel import Kernel
from chipwise.compile.time_gpu import interval, share_of_peak, timed
from refusals import refused

GPUS = [c for c in CHIPS if c.kind == "GPU" and all(getattr(c, name) is not None for name in NEEDED)]


def product(side, dtype="bf16", kind="matmul", **more):
    wide = {"f32": 4, "tf32": 4}.get(dtype, 2)
    shape = (side, side, side, 1)
    return Kernel(
        kind, kind, flops=2.0 * side**3, bytes=3.0 * wide * side**2, dtype=dtype, shape=shape, **more
    )


def copy(nbytes):
    return Kernel("copy", "copy", bytes=nbytes, dtype="f32")


def on(chip, kernel):
    (made,) = timed([kernel], chip)
    return made


@pytest.mark.parametrize("chip", GPUS, ids=lambda c: c.names[0])
def test_nothing_is_faster_than_the_catalogue(chip):
    for dtype, tflops in (
        ("bf16", chip.bf16_dense_tflops or chip.fp32_tflops),
        ("f16", chip.fp16_dense_tflops or chip.fp32_tflops),
        ("tf32", chip.tf32_dense_tflops or chip.fp32_tflops),
        ("f32", chip.fp32_tflops),
    ):
        made = on(chip, product(8192, dtype))
        least = 0.25 if chip.name in time_gpu.product_rates() else 0.5
        if dtype == "f16" and float(chip.compute_capability) < 7:
            tflops = chip.fp32_tflops  # without matrix units float16 is summed in float32
        assert made.bound == "compute" and least < 2 * 8192**3 / made.seconds / (tflops * 1e12) < 1
    moved = on(chip, copy(4e9))
    assert moved.bound == "memory" and moved.seconds > 4e9 / (chip.memory_GBps * 1e9)
    assert on(chip, copy(1e3)).bound == "launch"


@pytest.mark.parametrize("chip", [named("t4"), named("h100")], ids=["t4", "h100"])
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000))
def test_a_product_reaches_a_share_of_the_peak_that_is_none_of_more(chip, m, n, k):
    share = share_of_peak(m, n, k, 1, chip.streaming_multiprocessors, "tensor")
    assert 0 < share < 1
    assert share_of_peak(m, n, k, 1, 10**6, "tensor") <= share * 1.0001  # more cores, less use of them


def test_executions_are_counted():
    one, three = (on(named("a100"), dataclasses.replace(product(512), count=n)) for n in (1.0, 3.0))
    assert three.seconds == pytest.approx(3 * one.seconds) and three.bound == one.bound


def test_what_fits_in_half_of_l2_is_found_there():
    chip = named("a100")
    half = chip.l2_MiB * 2**19
    inside, outside = on(chip, copy(half)), on(chip, copy(half + 1))
    assert inside.seconds < 0.7 * outside.seconds


def test_odd_channels_are_filled_up_for_matrix_units_only():
    odd = dataclasses.replace(product(1024), shape=(1 << 20, 3, 3, 1), flops=2.0 * (1 << 20) * 9, bytes=1.0)
    full = dataclasses.replace(odd, shape=(1 << 20, 8, 8, 1), flops=2.0 * (1 << 20) * 64)
    chip = named("a100")
    assert on(chip, odd).seconds == pytest.approx(on(chip, full).seconds)
    odd, full = (dataclasses.replace(k, dtype="f32") for k in (odd, full))
    assert on(chip, odd).seconds < on(chip, full).seconds


def test_a_depthwise_convolution_does_not_get_matrix_units():
    shape = (1 << 20, 1, 9, 512)
    depthwise = Kernel(
        "c", "convolution", flops=2.0 * 9 * 512 * (1 << 20), bytes=1e6, dtype="bf16", shape=shape
    )
    dense = dataclasses.replace(depthwise, shape=(1 << 20, 512, 9, 1))
    chip = named("a100")
    assert on(chip, depthwise).seconds > 5 * on(chip, dense).seconds


def test_what_a_chip_cannot_multiply_in_it_does_in_float32():
    tf32, f32 = (on(named("v100"), product(4096, dtype)) for dtype in ("tf32", "f32"))
    assert tf32.seconds == f32.seconds and tf32.dtype == "f32"
    assert on(named("v100"), product(4096, "f16")).seconds < f32.seconds / 3


def test_cudnn_multiplies_less_in_windows_of_three():
    def convolution(side, stride, dtype="f32", c_in=128):
        pixels, c_out = 64 * 28 * 28, 128
        k = c_in * side**2
        moved = 4.0 * (pixels * (c_in * stride**2 + c_out) + k * c_out)
        window, flops = (side, side, stride, stride), 2.0 * pixels * c_out * k
        shape = (pixels, c_out, k, 1)
        return Kernel("c", "convolution", flops=flops, bytes=moved, dtype=dtype, shape=shape, window=window)

    def rate(*of):
        kernel = convolution(*of)
        return kernel.flops / on(named("v100"), kernel).seconds

    assert rate(3, 1) > 1.2 * max(rate(5, 1), rate(3, 2), rate(5, 2), rate(11, 4))
    assert rate(3, 1, "f16") < 1.2 * rate(5, 1, "f16")
    assert rate(3, 1, "f32", 3) < 1.2 * rate(5, 1, "f32", 3)
    of_kernel = dataclasses.replace(convolution(3, 1), shape=(9 * 128, 128, 64 * 28 * 28, 1))  # its gradient
    assert on(named("v100"), of_kernel).seconds < 1.2 * on(named("v100"), convolution(3, 1)).seconds


def test_the_interval_goes_by_the_chip_and_by_what_bounds_the_step(monkeypatch):
    fitted = {"generations": ["8.0"], "interval_90": {"known_chip": [0.8, 1.3], "other": [0.5, 2.0]}}
    monkeypatch.setattr(time_gpu, "efficiencies", lambda: fitted)
    known, new = named("a100"), dataclasses.replace(named("a100"), compute_capability="9.9")
    assert interval(known, {}) == (0.8, 1.3) and interval(new, {}) == (0.5, 2.0)
    assert interval(named("p100"), {}) == (pytest.approx(1 / 3), 3.0)  # no matrix units
    assert interval(known, {"launch": 1.0}) == (pytest.approx(1 / 3), 3.0)
    low, high = interval(known, {"launch": 0.4, "interconnect": 0.6})
    assert low == pytest.approx(0.4 / 3 + 0.6 / 2) and high == pytest.approx(0.4 * 3 + 0.6 * 2)


def test_where_less_is_known_the_fitted_interval_is_no_narrower():
    (low, high), (least, most) = (time_gpu.efficiencies()["interval_90"][k] for k in ("known_chip", "other"))
    assert least <= low < 1 < high <= most


def test_efficiencies_are_shares_and_few():
    fitted = time_gpu.efficiencies()
    values = dict(fitted["values"])
    assert 0 < values.pop("launch_seconds") < 1e-4 and len(values) <= 12
    assert 1 <= values.pop("winograd") < 2.25 and all(0 < value <= 1.1 for value in values.values())
    for low, high in fitted["interval_90"].values():
        assert 0 < low < 1 < high


def test_fitted_rows_are_those_that_may_be():
    import csv

    table = Path(__file__).parents[2] / "benchmarks/plan_accuracy/published.csv"
    with table.open(encoding="utf-8") as lines:
        use = {int(cells["row"]): cells["use"] for cells in csv.DictReader(lines)}
    assert all(use[row["row"]] == "fit" for row in time_gpu.efficiencies()["rows"])
    json.dumps(time_gpu.efficiencies())


# ---- what the compiler is told of a chip


@pytest.mark.parametrize("chip", GPUS, ids=lambda c: c.names[0])
def test_a_chip_is_described_by_its_own_figures(chip):
    text = target_config(compiled_as(chip))
    told = dict(
        line.strip().split(": ") for line in text.splitlines() if line.startswith("  ") and "{" not in line
    )
    if chip.compute_capability in GENERATIONS:
        assert int(told["core_count"]) == chip.streaming_multiprocessors
        assert float(told["clock_rate_ghz"]) == chip.clock_GHz
        assert int(told["memory_bandwidth"]) == round(chip.memory_GBps * 1e9)
    else:
        assert int(told["core_count"]) == named("p100").streaming_multiprocessors
    assert text.count("{") == text.count("}")


def test_a_capability_that_nobody_described_is_an_error():
    new = dataclasses.replace(named("h100"), compute_capability="99.0")
    with refused(DeviceError, "chip-without-figures", missing=["compute_capability"]):
        target_config(new)


# ---- sums over devices


def test_all_reduce():
    chip = named("a100")
    assert time_links.all_reduce_seconds(1e9, 1, chip) == 0.0
    two, eight = (time_links.all_reduce_seconds(1e9, n, chip) for n in (2, 8))
    assert 1e9 / 300e9 < two < eight < 2e9 / (300e9 * 0.6)
    sixteen = time_links.all_reduce_seconds(1e9, 16, chip)
    assert sixteen > 1.3 * eight  # eight cards between hosts are slower
    one_card = time_links.all_reduce_seconds(
        1e9, 16, dataclasses.replace(chip, interconnect_kind="PCIe4 x16")
    )
    assert one_card > 10 * sixteen
    for lacking in ({"interconnect_GBps_both_ways": None}, {"interconnect_kind": "InfinityFabric"}):
        with refused(DeviceError, "chip-without-interconnect"):
            time_links.all_reduce_seconds(1.0, 2, dataclasses.replace(chip, **lacking))
