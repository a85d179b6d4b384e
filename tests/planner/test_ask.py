"""Plans through the public door: what they hold, what they cannot say, and what they must not do."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import chipwise as cw
import tasks
from chipwise.base.facts import fact
from chipwise.chips import live_prices
from chipwise.chips.prices import cheapest, load, prices_for
from chipwise.chips.targets import parse
from chipwise.compile import processes
from chipwise.compile.answers import Answer
from chipwise.compile.processes import installed
from chipwise.data.synthetic import Absent
from chipwise.planner import ask, compile_step, time_run
from chipwise.planner.time_run import compilation, measured
from chipwise.step.layout import Layout
from compilers import no_gpu_compiler as no_gpu_compiler
from refusals import refused
from tasks import FEATURES

needs_libtpu = pytest.mark.skipif(installed("libtpu") is None, reason="needs libtpu")


SPEC = {"x": jax.ShapeDtypeStruct((FEATURES,), "uint8"), "label": jax.ShapeDtypeStruct((), "int32")}


class Shapes(Absent):
    """Data of which only shapes exist: to take an example is an error."""

    def __init__(self, length):
        super().__init__(length, SPEC, "a shape")

    def take(self, indices):
        raise AssertionError("a plan read an example")


def recipe(task=None, examples=100_000, **changes):
    task = task or tasks.task(train=Shapes(examples), eval=Shapes(1000))
    return tasks.recipe(**{"task": task, "batch": 64, "duration": "2ep", **changes})


@pytest.fixture(scope="module")
def plans(no_gpu_compiler):
    return cw.plan(recipe(), on=["t4", "a100:8", "h100-pcie"])


def test_targets_are_a_list_or_a_text_with_commas(plans):
    made = cw.plan(recipe(), on="t4, a100:8,h100-pcie")
    assert [(p.target, p.step_seconds) for p in made] == [(p.target, p.step_seconds) for p in plans]


def test_what_prices_of_today_leave_out_is_a_warning(no_gpu_compiler, monkeypatch):
    left_out = fact("prices-live-failed", clouds=["aws"], reasons=["aws (no route)"])
    said = (fact("prices-live", prices=1, clouds=["gcp"]), left_out)
    monkeypatch.setattr(live_prices, "live", lambda: live_prices.PricesRead(load(), said))
    with pytest.warns(UserWarning) as warned:
        cw.plan(recipe(), on="t4", prices="live")
    assert [str(one.message) for one in warned] == [str(left_out)]


def test_a_plan_adds_up(plans):
    for p in plans:
        assert p.runs and p.steps == 3125
        assert p.step_seconds.low <= p.step_seconds.value <= p.step_seconds.high
        parts = dict(p.step_parts)
        assert p.step_seconds.value == pytest.approx(max(parts.pop("dispatch"), sum(parts.values())))
        assert p.examples_per_second.value == pytest.approx(64 / p.step_seconds.value)
        assert p.wall_seconds.value == pytest.approx(sum(p.seconds.values()))
        low, high = p.overhead_seconds
        assert 0 < low < p.seconds["start"] + p.seconds["compile"] < high
        assert p.wall_seconds.low < low + p.seconds["train"] and p.wall_seconds.high > high
        assert p.memory.fits and p.memory.needed == sum(
            getattr(p.memory, name)
            for name in ("parameters", "optimizer", "state", "replica_sums", "activations", "data", "program")
        )


@pytest.mark.slow
def test_compilation_on_the_target_is_nobody_s_stopwatch():
    small, large = compilation("TPU", 600, 8, None), compilation("TPU", 15_000, 8, None)
    assert small.value < large.value and large.high == pytest.approx(3 * large.value)
    slow = compilation("TPU", 15_000, 8, 2)  # eight programs on two cores
    assert 3.5 * large.value < slow.value < 4 * large.value
    passes = compilation("TPU", 600, 8, None, 6)
    assert (passes.value, passes.high) == (small.value, 6 * small.high)
    one, two = cw.plan(recipe(), on=["a100:8"]), cw.plan(recipe(), on=["a100:8"], host_cores=2)
    assert one[0].seconds["compile"] < two[0].seconds["compile"]


@pytest.mark.slow
def test_a_run_shorter_than_its_allowances_is_ranked_by_its_step():
    (short,) = cw.plan(recipe(duration="1ep"), on=["t4"], eval_every="25%")
    assert short.evaluations == 4
    assert 0 < short.seconds["evaluate"] < 4 * 1000 / 64 / 3 * short.step_seconds.value  # in larger blocks
    assert short.seconds["train"] + short.seconds["evaluate"] < short.overhead_seconds[1]
    assert short.ranked_by == "step"
    (longer,) = cw.plan(recipe(duration="2000ep"), on=["t4"])
    assert longer.ranked_by == "run" and longer.overhead_seconds == short.overhead_seconds


def test_replicas_lie_as_training_lays_them(plans):
    t4, a100, _ = plans
    assert (t4.devices, t4.replicas_per_device) == (1, 8)
    assert (a100.devices, a100.devices_found, a100.replicas_per_device) == (8, 8, 1)
    assert t4.wire_bytes_per_step_per_device == 0
    assert a100.wire_bytes_per_step_per_device >= 2 * 7 / 8 * 4 * a100.parameters


def test_dollars_are_hours_at_a_dated_price(plans):
    t4 = plans[0]
    assert t4.costs
    for cost in t4.costs:
        assert cost.usd.value == pytest.approx(t4.wall_seconds.value / 3600 * cost.usd_per_hour)
        assert cost.date and cost.source and cost.includes
    assert t4.cheapest().includes != "accelerator alone"
    eight = plans[1]  # one host of eight linked GPUs, not eight hosts of one
    best = cheapest(prices_for(parse("a100:8"), load()))
    assert eight.cheapest().machines == 1
    assert (eight.cheapest().instance, eight.cheapest().usd_per_hour) == (best.instance, best.usd_per_hour)


@pytest.mark.slow
def test_more_devices_than_replicas_says_how_to_use_them():
    (p,) = cw.plan(recipe(), on=["a100:16"])
    assert (p.devices, p.devices_found) == (8, 16)
    (told,) = (a for a in p.advice if a.code == "advice-uneven")
    assert (told["groups"], told["idle"], told["better"][0]["count"]) == (16, 0.5, 16)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("gpus", range(1, 9))
@pytest.mark.drawn(share=0.25)
def test_advice_on_replicas_is_right_for_every_device_count(gpus, exact):
    (p,) = cw.plan(recipe(batch=2520), on=[f"a100:{gpus}"], exact=exact)
    layout = Layout(2520, 8, gpus, exact)
    assert p.devices == p.devices_found == gpus and p.replicas_per_device == -(-8 // gpus)
    uneven = [a for a in p.advice if a.code == "advice-uneven"]
    assert (8 % gpus > 0) == bool(uneven)
    for told in uneven:
        most = max(layout.shares)
        assert told["idle"] == 1 - 8 / (gpus * most)
        assert [one["count"] for one in told["better"]] == [-(-8 // gpus) * gpus]


@pytest.mark.slow
@needs_libtpu
def test_a_host_callback_is_refused_by_name():
    def talking(params, state, batch, key, train):
        jax.debug.print("{}", batch["x"][0, 0])
        return tasks.plain_loss(params, state, batch, key, train)

    task = tasks.task(train=Shapes(1000), eval=None, loss=talking)
    tpu, gpu = cw.plan(recipe(task), on=["v5e-8", "a100"])
    assert tpu.problem.code == gpu.problem.code == "refused-callback"


def test_what_cannot_be_planned_is_one_clear_error():
    with refused(cw.errors.DeviceError, "slice-unknown", chip="v3"):
        cw.plan(recipe(), on=["v3-4"])
    with refused(cw.errors.DeviceError, "target-unknown", hint="a100"):
        cw.plan(recipe(), on=["a1000"])
    with refused(cw.errors.DeviceError, "no-target"):
        cw.plan(recipe(), on=[])
    with refused(cw.errors.DeviceError, "target-cpu"):
        cw.plan(recipe(), on=["t4", "cpu"])
    with refused(cw.errors.RecipeError, "batch-indivisible", batch=63):
        cw.plan(recipe(batch=63), on=["t4"])

    def broken(params, state, batch, key, train):
        raise KeyError("pixels")

    task = dataclasses.replace(recipe().task, loss=broken)
    with refused(cw.errors.RecipeError, "task-column"):
        cw.plan(dataclasses.replace(recipe(), task=task), on=["t4"])


@pytest.mark.slow
def test_a_float64_recipe_is_refused_for_a_tpu_by_name():
    def double(params, state, batch, key, train):
        made, state = tasks.plain_loss(params, state, batch, key, train)
        wide = jnp.sum(batch["x"].astype(jnp.float64) * 0.1)
        return {**made, "wide": cw.Sum(wide.astype(jnp.float32), jnp.float32(1))}, state

    task = tasks.task(train=Shapes(1000), eval=None, loss=double)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        tpu, gpu = cw.plan(recipe(task, optimizer=cw.sgd(lr=0.1)), on=["v5e-8", "a100"])
    assert tpu.problem == fact("tpu-without-float64")
    assert gpu.runs and fact("advice-float64") in gpu.advice


def wide_loss(params, state, batch, key, train):
    """Activations of 64 kB a layer and example, which the backward pass keeps."""
    x = jnp.tile(batch["x"].astype(jnp.float32)[:, :1, None], (1, 128, 128))
    w = jnp.full((128, 128), params["w"][0, 0])
    for _ in range(32):
        x = jnp.tanh(x @ w)
    values = jnp.mean(x, axis=(1, 2))
    return {"loss": cw.Sum.of(values), "accuracy": cw.Sum.of(values)}, state


@pytest.mark.slow
def test_an_over_large_batch_names_the_bytes_and_the_largest_that_fits():
    task = dataclasses.replace(recipe().task, loss=wide_loss)
    big = dataclasses.replace(recipe(batch=1 << 16), task=task)
    (p,) = cw.plan(big, on=["t4"])
    assert not p.runs and not p.memory.fits and p.memory.needed > p.memory.available
    assert 8 <= p.largest_batch < big.batch and p.largest_batch % 8 == 0
    assert p.problem == fact(
        "batch-does-not-fit", needed=p.memory.needed, available=p.memory.available, largest=p.largest_batch
    )
    (q,) = cw.plan(dataclasses.replace(big, batch=p.largest_batch), on=["t4"])
    assert q.runs
    more = p.largest_batch + p.largest_batch // 20 // 8 * 8 + 8
    (r,) = cw.plan(dataclasses.replace(big, batch=more), on=["t4"])
    assert not r.runs


@pytest.mark.parametrize(("target", "platform", "extra"), [("v5e-8", "tpu", "tpu"), ("t4", "cuda", "gpu")])
def test_without_its_compiler_a_chip_gets_the_line_to_type(monkeypatch, target, platform, extra):
    monkeypatch.setattr(processes, "installed", lambda package: None)
    monkeypatch.setitem(compile_step.COMPILERS, platform, getattr(processes, f"{extra}_compiler"))
    (p,) = cw.plan(recipe(), on=[target])
    assert not p.runs and p.problem.code == "compiler-missing" and p.costs == ()
    assert p.problem["install"] == f"pip install 'chipwise[plan-{extra}]'"


@pytest.mark.slow
@needs_libtpu
def test_a_tpu_is_compiled_once_and_remembered():
    seen = []
    (first,) = cw.plan(recipe(), on=["v5e-8"], progress=lambda *a: seen.append(a))
    assert first.runs and seen[-1][0] == seen[-1][1] >= 2
    count = len(seen)
    (again,) = cw.plan(recipe(), on=["v5e-8"], progress=lambda *a: seen.append(a))
    assert len(seen) == count and again == first
    assert first.share_of_peak is None  # of float32 products, whose peak nobody publishes
    plain = tasks.task(train=Shapes(1000), eval=None, loss=tasks.plain_loss)
    (lower,) = cw.plan(recipe(plain, precision="bf16"), on=["v5e-8"])
    assert 0 < lower.share_of_peak < 1


@pytest.mark.slow
def test_a_slow_source_makes_the_input_the_bound():
    class Slow:
        spec = SPEC

        def __len__(self):
            return 1 << 40

        def __getitem__(self, index):
            time.sleep(0.01)
            return {"x": np.zeros(FEATURES, np.uint8), "label": np.int32(0)}

    slow = dataclasses.replace(recipe(), task=dataclasses.replace(recipe().task, train=Slow()))
    (p,) = cw.plan(slow, on=["t4"], host_cores=4)
    assert p.bound == "input" and p.feeding.input_bound
    assert 0 < p.feeding.examples_per_second_per_core <= 100  # each one sleeps for 10 ms
    assert p.decisive == (fact("advice-input-drawn", needed=p.feeding.cores_needed, cores=4),)
    assert p.examples_per_second.value == pytest.approx(4 * p.feeding.examples_per_second_per_core)


def test_feeding_hosts_have_the_cores_that_a_container_grants(no_gpu_compiler, monkeypatch):
    monkeypatch.setattr(ask, "usable_cores", lambda: 3)
    assert [p.feeding.cores for p in cw.plan(recipe(), on=["t4", "a100:16"])] == [3, 6]
    assert [p.feeding.cores for p in cw.plan(recipe(), on=["a100:16"], host_cores=5)] == [10]


class Elsewhere:
    spec = SPEC

    def __len__(self):
        return 1 << 40

    def __getitem__(self, index):
        raise FileNotFoundError("/scratch/photos")


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (Elsewhere(), "feed-unread"),
        (Shapes(1 << 40), "feed-not-measured"),
        (cw.data.Cached(Shapes(1 << 40)), "feed-not-measured"),
    ],
)
def test_data_that_is_not_here_is_planned_and_told(no_gpu_compiler, source, code):
    far = dataclasses.replace(recipe(), task=dataclasses.replace(recipe().task, train=source))
    (p,) = cw.plan(far, on=["t4"])
    assert p.runs and p.bound != "input" and p.feeding.measured_on.code == code
    assert [note.code for note in p.notes if note.code.startswith("feed")] == [code] * (code == "feed-unread")


def test_a_host_is_measured_as_training_reads_it(monkeypatch):
    """Several examples at once, also through weights, and without what the first access loads."""
    read = []

    class Rows(cw.Arrays):
        def fill(self, indices, out):
            read.append(len(indices))
            clock.append(clock[-1] + (1.0 if len(read) == 1 else 0.01) * len(indices))
            super().fill(indices, out)

    clock = [0.0]
    monkeypatch.setattr(time_run.time, "perf_counter", lambda: clock[-1])
    rows = Rows(x=np.zeros((40, FEATURES), np.uint8), label=np.zeros(40, np.int32))
    for source in (rows, cw.data.Weighted(rows, np.ones(40))):
        read.clear()
        assert measured(source, 0).examples_per_second_per_core == pytest.approx(100)
        assert read[0] == 1 and read[-1] == 16


@pytest.mark.parametrize("target", ["tpu7x-8", "h100"])
def test_a_compiler_that_crashes_is_that_target_s_problem(monkeypatch, target):
    crash = fact("compiler-crashed", program="replica", signal="SIGSEGV", log="")
    died = Answer("replica", crash)
    monkeypatch.setattr(ask, "compile_steps", lambda cases, **_: enumerate([{"replica": died}]))
    (p,) = cw.plan(recipe(), on=[target])
    assert not p.runs and p.problem == crash
    with refused(cw.errors.DeviceError, "compiler-crashed", signal="SIGSEGV"):
        p.check()


@pytest.mark.slow
def test_a_machine_that_fails_while_the_largest_batch_is_searched_for_leaves_it_unknown(monkeypatch):
    failed = Answer("replica", fact("compiler-killed", program="replica", signal="SIGKILL", log=""))
    answers = iter([ask.compile_steps])

    def compile_steps(cases, **options):
        real = next(answers, None)
        return real(cases, **options) if real else enumerate([{"replica": failed}])

    monkeypatch.setattr(ask, "compile_steps", compile_steps)
    (p,) = cw.plan(recipe(), on=["t4"], find_largest_batch=True)
    assert p.problem == failed.problem and p.largest_batch is None


def test_an_old_gpu_is_timed_by_its_own_figures_as_another_s_program():
    old, stand_in = cw.plan(recipe(), on=["k80", "p100"])
    assert old.runs and old.step_seconds.value > stand_in.step_seconds.value
    assert fact("compiled-as-another", chip=old.chip, other=stand_in.chip) in old.notes
    assert stand_in.chip not in str(stand_in.notes)


@pytest.mark.slow
def test_a_plan_of_a_net_of_pytorch_says_that_it_is_not_pytorch_s():
    plain = recipe()
    made = dataclasses.replace(plain, task=dataclasses.replace(plain.task, framework="torch"))
    told = [[note.code for note in cw.plan(one, on=["t4"])[0].notes] for one in (plain, made)]
    assert told[1] == [*told[0], "not-of-pytorch"]


def test_a_gpu_without_figures_says_which():
    (p,) = cw.plan(recipe(), on=["h100-nvl"])
    assert not p.runs and p.problem.code == "chip-without-figures" and "fp32_tflops" in p.problem["missing"]


def test_the_kernels_are_those_of_a_step():
    (p,) = cw.plan(recipe(), on=["a100"])
    assert {k.program for k in p.kernels} == {"replica", "reduce", "update"}
    device = sum(p.step_parts.values()) - p.step_parts["dispatch"]
    assert sum(k.seconds for k in p.kernels) == pytest.approx(device)
    assert {k.count for k in p.kernels if k.program == "replica"} == {8.0} and p.replicas_per_device == 8
    assert [k.seconds for k in p.kernels] == sorted((k.seconds for k in p.kernels), reverse=True)
