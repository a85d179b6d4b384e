import jax.numpy as jnp
import pytest

import chipwise as cw
import tasks
from chipwise.base.errors import DeviceError
from chipwise.chips.catalogue import CHIPS, named
from chipwise.chips.gpus import target_config
from chipwise.chips.targets import parse
from chipwise.compile import processes
from chipwise.compile.answers import CompileRequest
from chipwise.compile.exports import export_program
from chipwise.compile.processes import installed
from chipwise.machine.compiler import compiler_options
from chipwise.planner import compile_step
from chipwise.planner.compile_step import collective
from chipwise.planner.tracing import training_step
from chipwise.recipes.load import load
from chipwise.step.layout import Layout
from chipwise.step.reduce import Exchange
from planner import asked
from planner.asked import SPEC, V5E, compile_all, product, request_for

with_libtpu = pytest.mark.skipif(installed("libtpu") is None, reason="needs libtpu")

NOWHERE = {"topology_name": "v5e:99x99"}


# ---- the real compiler


@with_libtpu
def test_a_program_for_a_chip_that_is_not_here(tmp_path):
    seen = []
    requests = [
        request_for(clock_GHz=1.5, memory_GBps=819.0),
        CompileRequest("reduce", V5E, collective(Exchange("reduce", 4, 100_000, 2, True))),
        CompileRequest("update", V5E, export_program(jnp.add, (SPEC, SPEC)), donate=(0,)),
        CompileRequest("scatter", V5E, collective(Exchange("reduce", 4, 100_000, 2, True, cut=98_304))),
        CompileRequest("gather", V5E, collective(Exchange("gather", 4, 98_304))),
        CompileRequest("nowhere", NOWHERE, collective(Exchange("reduce", 1, 10, 1, True))),
    ]
    told = compile_all(requests, cache_dir=tmp_path, progress=lambda *a: seen.append(a))
    replica, reduce, _, scatter, gather, nowhere = told
    assert [t.name for t in told] == ["replica", "reduce", "update", "scatter", "gather", "nowhere"]
    assert {t.problem for t in told[:-1]} == {None}
    assert sum(k.seconds for k in replica.kernels if k.kind == "matmul") >= 2 * 256**3 / 197e12
    assert reduce.wire_bytes >= 1.5 * 4 * 100_000
    assert reduce.wire_bytes > scatter.wire_bytes > gather.wire_bytes >= 0.75 * 4 * 98_304
    assert nowhere.problem.code == "topology-unknown" and nowhere.problem["program"] == "nowhere"
    assert seen == [(done, 6) for done in range(7)]


def has_gpu_compiler():
    try:
        processes.gpu_compiler()
    except DeviceError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not has_gpu_compiler(), reason="needs a compiler for GPUs")
def test_a_program_for_a_gpu_that_is_not_here(tmp_path):
    config = {"topology_name": "", "target_config": target_config(named("h100"))}
    one, two = ({**config, "topology": f"1x1x{n}"} for n in (1, 2))
    program = export_program(product, ({"x": SPEC}, SPEC), "cuda")
    options = compiler_options("cuda", True, "NVIDIA H100 80GB HBM3")
    told = compile_all(
        [
            CompileRequest("replica", one, program, platform="cuda", options=options),
            CompileRequest("reduce", two, collective(Exchange("reduce", 2, 1000, 1, True)), platform="cuda"),
            CompileRequest("nowhere", {**one, "target_config": "of no chip"}, program, platform="cuda"),
        ],
        cache_dir=tmp_path,
    )
    replica, reduce, nowhere = told
    assert replica.problem is None and replica.temp_bytes > 0 and replica.flops == 2 * 256**3
    (made,) = [k for k in replica.kernels if k.kind == "matmul"]
    assert made.dtype == "bf16" and made.line.startswith(asked.__file__)
    assert reduce.problem is None and reduce.wire_bytes > 0
    assert nowhere.problem.code == "compiler-failed" and "target_config" in nowhere.problem["message"]


@pytest.mark.slow
@pytest.mark.skipif(not has_gpu_compiler(), reason="needs a compiler for GPUs")
@pytest.mark.parametrize("exact", [True, False])
def test_products_are_library_calls_since_none_can_be_tuned_here(exact, monkeypatch):
    requests = []

    def compile_each(asked, **_):
        requests.extend(asked)
        return iter(())

    monkeypatch.setattr(compile_step, "compile_each", compile_each)
    step = training_step(tasks.recipe(), Layout(64, 8, 2, exact), resident=True)
    assert list(compile_step.compile_steps([(parse("h100:2"), step)])) == []
    options = next(request.options for request in requests if request.name == "replica")
    assert options["xla_gpu_autotune_level"] == 0 and options["xla_gpu_enable_triton_gemm"] is False
    assert ("xla_gpu_deterministic_ops" in options) == exact


@pytest.mark.slow
@pytest.mark.skipif(not has_gpu_compiler(), reason="needs a compiler for GPUs")
@pytest.mark.parametrize("chip", ["h100", "a100"])
def test_a_group_of_gpus_calls_cudnn_and_gathers_beside_products(chip):
    sizes = [
        "depth=3",
        "width=1024",
        "heads=8",
        "kv_heads=4",
        "hidden=4096",
        "vocabulary=4096",
        "context=2048",
    ]
    recipe = load("llama-8b", [*sizes, "batch=8", "replicas=1"], synthetic=True)
    target = parse(f"{chip}:8")
    programs = training_step(recipe, Layout.of(recipe, 8), resident=False)
    ((_, answers),) = compile_step.compile_steps([(target, programs)])
    assert all(answer.problem is None for answer in answers.values())
    kernels = answers["replica"].kernels
    attended = [kernel for kernel in kernels if kernel.kind == "attention"]
    assert sum(kernel.count for kernel in attended) == 3 * 3  # forward, again for the gradient, backward
    assert {kernel.shape for kernel in attended} == {(2048, 2048, 128, 8)}
    sent = [kernel for kernel in kernels if kernel.kind == "collective"]
    assert sum(k.count * k.bytes for k in sent) == pytest.approx(answers["replica"].wire_bytes)
    products = {kernel.name for kernel in kernels if kernel.kind == "matmul"}
    beside = [kernel for kernel in sent if products & set(kernel.beside)]
    assert sum(k.count * k.bytes for k in beside) > answers["replica"].wire_bytes / 3


GPUS = [chip.names[0] for chip in CHIPS if chip.kind == "GPU" and chip.fp32_tflops]


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.skipif(not has_gpu_compiler(), reason="needs a compiler for GPUs")
@pytest.mark.parametrize("card", GPUS)
def test_a_recipe_for_each_gpu_of_the_catalogue(card, tmp_path):
    (plan,) = cw.plan(load("digits"), [card], cache=tmp_path, measure_feed=False)
    assert plan.problem is None and plan.memory.fits
    assert plan.step_seconds.low < plan.step_seconds.value < plan.step_seconds.high
    assert {note.code for note in plan.notes} >= {"kernels-timed"}
    assert ("compiled-as-another" in {note.code for note in plan.notes}) == (card == "k80")
