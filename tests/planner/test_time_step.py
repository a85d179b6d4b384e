"""A step's kernels hold all of its time: its programs, the sums between them, the links."""

import dataclasses
from types import SimpleNamespace

import pytest

from chipwise.chips.targets import parse
from chipwise.compile import time_tpu
from chipwise.compile.hlo.kernel import Kernel
from chipwise.compile.time_links import sum_seconds
from chipwise.planner import time_step
from chipwise.planner.time_step import StepTime

SIZE = 10**8  # float32 of a gradient


def programs(calls, local, devices):
    layout = SimpleNamespace(devices=devices, groups=devices, exact=True, shards=1, vectors=1)
    recipe = SimpleNamespace(precision="bf16")
    counts = {"calls": calls, "local_vectors": local, "size": SIZE, "gathered": 0}
    return SimpleNamespace(**counts, layout=layout, recipe=recipe, programs=[SimpleNamespace(name="replica")])


@pytest.mark.parametrize("exact", [True, False])
def test_a_sum_in_any_order_takes_the_links_for_the_collectives_it_was_compiled_to(exact):
    target, of = parse("v3-32"), programs(1, 1, 32)
    of.layout.exact = exact
    half = 31 / 32 * 4.0 * SIZE  # of what an all-reduce sends
    compiled = [
        Kernel("all-reduce", "collective", bytes=2 * half),
        Kernel("all-gather", "collective", bytes=half),
    ]
    (ring,) = time_step.between(of, target, compiled)
    whole = sum_seconds(4.0 * SIZE, target, 32, exact)
    assert ring.seconds == pytest.approx(whole * (1 if exact else 1.5))
    assert ring.bytes == pytest.approx(2 * half * (1 if exact else 1.5))


@pytest.mark.parametrize("name", ["a100:8", "v5e-8"])
def test_the_links_take_the_place_of_what_a_collective_moves_meanwhile(name, monkeypatch):
    monkeypatch.setattr(time_step, "dispatch_seconds", lambda step, target: 1e-5)
    target, of = parse(name), programs(3, 3, 8)
    add = Kernel("add", "elementwise", seconds=0.01, bound="memory")
    moved = Kernel("all-gather", "collective", seconds=9.0, bound="memory")
    kernels = {
        "replica": [Kernel("dot", "matmul", seconds=0.1, bound="compute")],
        "reduce": time_step.between(of, target, [add, moved]),
        "update": [Kernel("sgd", "elementwise", seconds=0.02, bound="memory")],
    }
    empty = StepTime("compiled")
    step = time_step.finished(empty, of, target, kernels)
    wire = sum_seconds(4.0 * SIZE, target, 8)
    assert step.parts["reduce"] == pytest.approx(0.01 + wire) and step.parts["replica"] == pytest.approx(0.3)
    (ring,) = (k for k in step.kernels if k.kind == "collective")
    assert ring.seconds == wire and (ring.bound, ring.program) == ("interconnect", "reduce")
    assert step.seconds.value == pytest.approx(sum(k.seconds for k in step.kernels))
    assert step.bound == "compute" and step.seconds.low < step.seconds.value < step.seconds.high


@pytest.mark.parametrize("name", ["h100:8", "v5e-8"])
def test_in_a_group_a_collective_takes_what_no_computation_hides_and_each_hides_once(name):
    target, group = parse(name), SimpleNamespace(shards=8)
    whole = sum_seconds(1e9, target, 8)  # all devices have 1e9 bytes, and then their sum
    dot = Kernel("dot", "matmul", 3.0, seconds=3 * 0.8 * whole, bound="compute")
    sent = {"all-gather": 7 / 8 * 1e9, "reduce-scatter": 7 / 8 * 1e9, "all-reduce": 2 * 7 / 8 * 1e9}
    timed = [
        Kernel(kind, "collective", 3.0, seconds=9.0, bytes=size, beside=("dot",))
        for kind, size in sent.items()
    ]
    alone = dataclasses.replace(timed[0], beside=())
    kernels = time_step.within(group, target, [dot, *timed, alone])
    assert kernels[0] == dot and all(k.bound == "interconnect" and not k.beside for k in kernels[1:])
    exposed = [k.seconds / whole for k in kernels[1:]]
    assert exposed == pytest.approx([0.0, 3 * 0.2, 3 * 1.0, 3 * 0.5])
    assert time_step.within(SimpleNamespace(shards=1), target, [dot]) == [dot]


@pytest.mark.parametrize("name", ["a100", "v5e-1"])
def test_replicas_one_after_another_are_added_as_they_come(name):
    assert time_step.between(programs(4, 4, 1), parse(name), []) == []
    (added,) = time_step.between(programs(64, 1, 1), parse(name), [])
    assert added.count == 63 and added.seconds >= 63 * 12 * SIZE / (parse(name).chip.memory_GBps * 1e9)


def test_what_only_moves_data_on_a_tpu_takes_its_bytes_at_the_speed_of_a_copy():
    chip = parse("v4-8").chip
    moving = 1e9 / (chip.memory_GBps * 1e9)  # seconds of a GB

    def time(kind, times, passes=1, bound="memory", dtype="f32"):
        seconds = 2 * times * moving
        one = Kernel("k", kind, count=2, seconds=seconds, bytes=1e9, flops=1e9, bound=bound, dtype=dtype)
        return time_tpu.timed([one], chip, passes)[0].seconds / (2 * moving)

    share = 1 / time_tpu.MEMORY_SHARE + time_tpu.START_SECONDS / moving
    assert time("copy", 9) == pytest.approx(share) and time("copy", 1.1) == pytest.approx(1.1)
    assert time("copy", 9, bound="compute") == pytest.approx(9)  # turned
    for dtype, counted in (("f32", 1), ("bf16", 2), ("u8", 4), ("pred", 4)):
        edge = time_tpu.ARITHMETIC * counted
        assert time("elementwise", 0.99 * edge, dtype=dtype) == pytest.approx(share)
        assert time("elementwise", 1.01 * edge, dtype=dtype) == pytest.approx(1.01 * edge)
    assert time("other", 9) == pytest.approx(9)
    assert time("matmul", 9) == pytest.approx(share) and time("convolution", 1.1) == pytest.approx(1.1)
    prefetch = Kernel("prefetch", "copy", seconds=0.1, bound="memory")
    assert time_tpu.timed([prefetch], chip)[0].seconds == 0.1
    erf = Kernel("k", "elementwise", seconds=9 * moving, bytes=1e9, bound="memory")
    assert time_tpu.timed([erf], chip)[0].bound == "compute"


@pytest.mark.parametrize("passes", [1, 6])
def test_a_product_is_timed_by_its_bytes_if_they_take_longer_than_it_does_at_half_of_the_peak(passes):
    chip = parse("v4-8").chip
    moving = 1e9 / (chip.memory_GBps * 1e9)

    def time(products):  # at the peak, as times of the bytes
        flops = products * moving * chip.bf16_dense_tflops * 1e12 / passes
        product = Kernel("k", "matmul", seconds=9 * moving, bytes=1e9, flops=flops, bound="compute")
        (timed,) = time_tpu.timed([product], chip, passes)
        return timed.seconds / moving, timed.bound

    assert time(0.51) == (pytest.approx(9 * passes), "compute")
    seconds, bound = time(0.49)
    assert bound == "memory" and seconds == pytest.approx(1 / time_tpu.MEMORY_SHARE, rel=0.01)


@pytest.mark.parametrize(
    ("target", "size", "published"),  # bytes copied, GB/s of reading and writing, by one device
    [
        ("tpu7x-8", 2 << 20, 1379.3), ("tpu7x-8", 4 << 20, 2249.7), ("tpu7x-8", 16 << 20, 2757.3),
        ("tpu7x-8", 64 << 20, 3097.2), ("tpu7x-8", 1 << 30, 3198.4), ("tpu7x-8", 8 << 30, 3210.5),
        ("v6e-8", 32 << 20, 1359.6),
    ],
)  # fmt: skip
def test_a_copy_takes_what_google_published(target, size, published):
    copy = Kernel("k", "copy", seconds=1.0, bytes=2 * size, bound="memory", dtype="bf16")
    (timed,) = time_tpu.timed([copy], parse(target).chip)
    assert timed.seconds == pytest.approx(2 * size / (published * 1e9), rel=0.12)


def test_the_further_a_tpu_s_cycles_are_above_its_bandwidth_the_less_they_are_known():
    known, chip = parse("v4-8").chip, parse("tpu7x-8").chip  # of a 7x no row is fitted
    low, high = time_tpu.FACTORS["other"]
    assert time_tpu.interval([], known) == tuple(time_tpu.FACTORS["known_chip"])
    assert low < time_tpu.FACTORS["known_chip"][0]

    def factors(seconds):
        kernel = Kernel("k", "matmul", seconds=seconds, bytes=chip.memory_GBps * 1e9 / 2)  # half a chip
        return time_tpu.interval([kernel], chip)

    assert factors(1.0) == (low, high) and factors(16.0) == (pytest.approx(0.25), high)
    assert time_tpu.interval([], chip) == (low, high)
