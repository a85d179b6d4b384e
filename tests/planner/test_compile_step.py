import json
import os

import jax.numpy as jnp
import pytest

import tasks
from chipwise.chips.catalogue import named
from chipwise.chips.gpus import target_config
from chipwise.chips.targets import parse
from chipwise.engine.layout import Layout
from chipwise.engine.reduce import Exchange
from chipwise.engine.step import compiler_options
from chipwise.errors import DataError, DeviceError
from chipwise.planner import compile_processes, compile_step
from chipwise.planner.compile_answers import CompileRequest
from chipwise.planner.compile_processes import installed
from chipwise.planner.tracing import export_program, training_step
from chipwise.recipe.settings import load
from planner import asked
from planner.asked import ALL, SPEC, V5E, compile_all, product, request_for
from refusals import refused

with_libtpu = pytest.mark.skipif(installed("libtpu") is None, reason="needs libtpu")


# ---- the real compiler


@with_libtpu
def test_a_program_for_a_chip_that_is_not_here(tmp_path):
    seen = []
    requests = [
        request_for(clock_GHz=1.5, memory_GBps=819.0),
        CompileRequest("reduce", V5E, Exchange("reduce", 4, 100_000, 2, True)),
        CompileRequest("update", V5E, export_program(jnp.add, (SPEC, SPEC)), donate=(0,)),
        CompileRequest("scatter", V5E, Exchange("reduce", 4, 100_000, 2, True, cut=98_304)),
        CompileRequest("gather", V5E, Exchange("gather", 4, 98_304)),
        CompileRequest("nowhere", {"topology_name": "v5e:99x99"}, Exchange("reduce", 1, 10, 1, True)),
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
        compile_processes.gpu_compiler()
    except DeviceError:
        return False
    return True


@pytest.mark.skipif(not has_gpu_compiler(), reason="needs a compiler for GPUs")
def test_a_program_for_a_gpu_that_is_not_here(tmp_path):
    config = {"topology_name": "", "target_config": target_config(named("h100"))}
    one, two = ({**config, "topology": f"1x1x{n}"} for n in (1, 2))
    program = export_program(product, ({"x": SPEC}, SPEC), "cuda")
    options = compiler_options("cuda", True, "NVIDIA H100 80GB HBM3")
    told = compile_all(
        [
            CompileRequest("replica", one, program, platform="cuda", options=options),
            CompileRequest("reduce", two, Exchange("reduce", 2, 1000, 1, True), platform="cuda"),
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


# ---- the cache


def test_a_second_time_no_child_is_started(child, tmp_path):
    started = child(ALL)
    first = compile_all([request_for()], cache_dir=tmp_path)
    again = compile_all([request_for(name="another name")], cache_dir=tmp_path)
    assert started() == 1
    assert (first[0].name, again[0].name) == ("replica", "another name")
    assert first[0].temp_bytes == again[0].temp_bytes == 7


def test_the_same_program_twice_is_compiled_once(child, tmp_path):
    child(ALL)
    seen = []
    told = compile_all([request_for()] * 2, cache_dir=tmp_path, progress=lambda *a: seen.append(a))
    assert seen == [(0, 1), (1, 1)]
    assert told[0] == told[1]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"name": "x", "of another": 1}', b"\xff\xfe\x00"])
def test_a_damaged_entry_is_made_again(child, tmp_path, damage):
    started, asked = child(ALL), [request_for()]
    compile_all(asked, cache_dir=tmp_path)
    (entry,) = tmp_path.glob("*.json")
    whole = json.loads(entry.read_bytes())
    entry.write_bytes(damage)
    assert compile_all(asked, cache_dir=tmp_path)[0].temp_bytes == 7
    again = json.loads(entry.read_bytes())
    assert started() == 2 and again == whole
    entry.write_text(json.dumps({**whole, "temp_bytes": 8}))  # another number
    assert compile_all(asked, cache_dir=tmp_path)[0].temp_bytes == 7
    entry.unlink()
    os.mkfifo(entry)  # not waited for
    assert compile_all(asked, cache_dir=tmp_path)[0].temp_bytes == 7 and started() == 4
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("tmp")]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CHIPWISE_CACHE", raising=False)
    assert compile_step.cache_folder(None) == tmp_path / "chipwise" / "plan"
    monkeypatch.setenv("CHIPWISE_CACHE", str(tmp_path / "own"))
    assert compile_step.cache_folder(None) == tmp_path / "own" / "plan"
    monkeypatch.setenv("CHIPWISE_CACHE", "~nobody-of-this-name/cache")
    with refused(DataError, "homeless"):
        compile_step.cache_folder(None)
