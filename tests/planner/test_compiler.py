import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from chipwise.chips.catalogue import named
from chipwise.chips.gpus import target_config
from chipwise.chips.targets import parse
from chipwise.engine.layout import Layout
from chipwise.engine.step import compiler_options
from chipwise.errors import ChipwiseError, DeviceError
from chipwise.planner import compiler, compilers, steps
from chipwise.planner.compiler import (
    Compiled,
    Request,
    compile_all,
    refusal,
)
from chipwise.planner.compilers import PIP, Compiler, installed
from chipwise.planner.exporting import GatherRequest, ReduceRequest, export_program
from chipwise.planner.kernels import Kernel
from chipwise.planner.programs import step_programs
from chipwise.recipe.settings import load
from chipwise.words.facts import fact
from refusals import refused

V5E = {"topology_name": "v5e:2x4", "chips_per_host_bounds": [2, 4, 1]}
SPEC = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)

with_libtpu = pytest.mark.skipif(installed("libtpu") is None, reason=f"needs libtpu: {PIP}")


def product(a, b):
    return {"out": a["x"] @ b}


def request_for(function=product, name="replica", **more):
    return Request(name, V5E, export_program(function, ({"x": SPEC}, SPEC)), **more)


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Puts a script in the compiler's place: `run(code)`. In it, `begin(r)` and `done(r)` are what the child
    says of a request `r` of `requests`. Counts how often it was started."""
    for platform in ("tpu", "cuda"):
        monkeypatch.setitem(compiler.COMPILERS, platform, lambda platform=platform: Compiler(platform, "0.0"))
    starts = tmp_path / "starts"
    starts.write_text("")
    real = subprocess.Popen

    def run(code):
        script = tmp_path / "child.py"
        script.write_text(
            textwrap.dedent(
                f"""
                import json, os, pathlib, signal, sys
                open({str(starts)!r}, "a").write("x")
                requests = json.loads((pathlib.Path(sys.argv[1]) / "requests.json").read_text())
                def say(r, answer):
                    print(json.dumps(dict(key=r["key"], answer=answer)), flush=True)
                def begin(r): say(r, None)
                def done(r): say(r, dict(name=r["name"], seconds=7.0, problem=None, notes=[]))
                """
            )
            + textwrap.dedent(code)
        )

        def start(arguments, **options):
            return real([sys.executable, str(script), arguments[-1]], **options)

        monkeypatch.setattr(compiler.subprocess, "Popen", start)
        return lambda: len(starts.read_text())

    return run


ALL = "for r in requests: begin(r); done(r)"


# ---- the real compiler


@with_libtpu
def test_a_program_for_a_chip_that_is_not_here(tmp_path):
    seen = []
    requests = [
        request_for(clock_GHz=1.5, memory_GBps=819.0),
        Request("reduce", V5E, ReduceRequest(4, 2, 100_000, True)),
        Request("update", V5E, export_program(jnp.add, (SPEC, SPEC)), donate=(0,)),
        Request("scatter", V5E, ReduceRequest(4, 2, 100_000, True, cut=98_304)),
        Request("gather", V5E, GatherRequest(4, 98_304)),
        Request("nowhere", {"topology_name": "v5e:99x99"}, ReduceRequest(1, 1, 10, True)),
    ]
    told = compile_all(requests, cache_dir=tmp_path, progress=lambda *a: seen.append(a))
    replica, reduce, _, scatter, gather, nowhere = told
    assert [t.name for t in told] == ["replica", "reduce", "update", "scatter", "gather", "nowhere"]
    assert {t.problem for t in told[:-1]} == {None}
    assert set(replica.seconds_by_kind) >= {"matmul"} and replica.seconds >= 2 * 256**3 / 197e12
    assert reduce.wire_bytes >= 1.5 * 4 * 100_000
    assert reduce.wire_bytes > scatter.wire_bytes > gather.wire_bytes >= 0.75 * 4 * 98_304
    assert nowhere.problem.code == "topology-unknown" and nowhere.problem["program"] == "nowhere"
    assert [done for done, *_ in seen] == list(range(7)) and {total for _, total, *_ in seen} == {6}
    assert seen[0][3] is None and seen[1][3] > 0 and seen[6][3] == 0  # seconds left


def has_gpu_compiler():
    try:
        compilers.gpu_compiler()
    except DeviceError:
        return False
    return True


@pytest.mark.skipif(not has_gpu_compiler(), reason=f"needs a compiler for GPUs: {PIP}")
def test_a_program_for_a_gpu_that_is_not_here(tmp_path):
    config = {"topology_name": "", "target_config": target_config(named("h100"))}
    one, two = ({**config, "topology": f"1x1x{n}"} for n in (1, 2))
    program = export_program(product, ({"x": SPEC}, SPEC), "cuda")
    options = compiler_options("cuda", True, "NVIDIA H100 80GB HBM3")
    told = compile_all(
        [
            Request("replica", one, program, platform="cuda", options=options),
            Request("reduce", two, ReduceRequest(2, 1, 1000, True), platform="cuda"),
            Request("nowhere", {**one, "target_config": "of no chip"}, program, platform="cuda"),
        ],
        cache_dir=tmp_path,
    )
    replica, reduce, nowhere = told
    assert replica.problem is None and replica.temp_bytes > 0 and replica.flops == 2 * 256**3
    (made,) = [k for k in replica.kernels if k.kind == "matmul"]
    assert made.dtype == "bf16" and made.line.startswith(__file__)
    assert reduce.problem is None and reduce.wire_bytes > 0
    assert nowhere.problem.code == "topology-unknown"


@pytest.mark.slow
@pytest.mark.skipif(not has_gpu_compiler(), reason=f"needs a compiler for GPUs: {PIP}")
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
    programs = step_programs(recipe, Layout.of(recipe, 8), resident=False)
    ((_, answers),) = steps.compile_steps([(target, programs)])
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


# ---- exporting


def test_exporting_needs_no_tpu_and_flattens():
    made = export_program(product, ({"x": SPEC}, SPEC))
    back = jax.export.deserialize(bytearray(made.body))
    assert back.platforms == ("tpu",)
    assert [a.shape for a in back.in_avals] == [(256, 256)] * 2 and len(back.out_avals) == 1


def test_the_key_is_of_the_program_not_of_where_it_stands(tmp_path):
    keys = set()
    for i, source in enumerate(["def f(x): return x + x", "\n\n\ndef f(x):\n    return x + x"]):
        path = tmp_path / f"{i}.py"
        path.write_text(source)
        space: dict = {}
        exec(compile(source, str(path), "exec"), space)
        keys.add(export_program(space["f"], (SPEC,)).key)
    assert len(keys) == 1
    assert export_program(lambda x: x * x, (SPEC,)).key not in keys


def test_the_key_is_the_same_in_another_process():
    code = (
        "import jax, jax.numpy as jnp\n"
        "from chipwise.planner.exporting import export_program\n"
        "s = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)\n"
        "print(export_program(lambda a, b: {'out': a['x'] @ b}, ({'x': s}, s)).key)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": "1"}, capture_output=True, text=True
    )
    assert ran.stdout.strip() == export_program(lambda a, b: {"out": a["x"] @ b}, ({"x": SPEC}, SPEC)).key


def test_the_key_does_not_depend_on_who_asks():
    def deeper(n):
        return deeper(n - 1) if n else export_program(product, ({"x": SPEC}, SPEC)).key

    assert deeper(5) == deeper(0)


def test_everything_that_changes_the_answer_changes_the_key():
    base = request_for()
    others = [
        request_for(donate=(0,)),
        request_for(clock_GHz=1.0),
        Request("replica", {"topology_name": "v2:2x2"}, base.program),
        Request("replica", V5E, ReduceRequest(8, 1, 10, True)),
        Request("replica", V5E, ReduceRequest(8, 1, 10, False)),
    ]
    keys = [r.key("jax 1") for r in [base, *others]] + [base.key("jax 2")]
    assert len(set(keys)) == len(keys)
    assert Request("other name", V5E, base.program).key("jax 1") == base.key("jax 1")


# ---- the cache


def test_a_second_time_no_child_is_started(child, tmp_path):
    started = child(ALL)
    first = compile_all([request_for()], cache_dir=tmp_path)
    again = compile_all([request_for(name="another name")], cache_dir=tmp_path)
    assert started() == 1
    assert (first[0].name, again[0].name) == ("replica", "another name")
    assert first[0].seconds == again[0].seconds == 7.0


def test_the_same_program_twice_is_compiled_once(child, tmp_path):
    child(ALL)
    seen = []
    told = compile_all([request_for()] * 2, cache_dir=tmp_path, progress=lambda *a: seen.append(a))
    assert seen == [(0, 1, "", None), (1, 1, "replica", 0)] and told[0] == told[1]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"name": "x", "of another": 1}', b"\xff\xfe\x00"])
def test_a_damaged_entry_is_made_again(child, tmp_path, damage):
    started, asked = child(ALL), [request_for()]
    compile_all(asked, cache_dir=tmp_path)
    (entry,) = tmp_path.glob("*.json")
    whole = json.loads(entry.read_bytes())
    entry.write_bytes(damage)
    assert compile_all(asked, cache_dir=tmp_path)[0].seconds == 7.0
    again = json.loads(entry.read_bytes())
    taken = {"compile_seconds": 0.0}  # which no two compilations share
    assert started() == 2 and again | taken == whole | taken
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("tmp")]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiler.default_cache() == tmp_path / "chipwise" / "plan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiler.default_cache() == tmp_path / ".cache" / "chipwise" / "plan"


# ---- a child that fails


def three():
    return [request_for(lambda a, b, n=n: product(a, b)["out"] + n, name=f"p{n}") for n in range(3)]


def test_a_child_that_dies_costs_only_the_program_it_was_at(child, tmp_path):
    started = child(
        """
        for r in requests:
            begin(r)
            if r["name"] == "p1":
                print("F1122 05:00:00.1 1 a.cc:7] Check failed: tiles == 3", file=sys.stderr)
                print("*** SIGSEGV received ***", "    @ 0x7f0 f()", sep="\\n", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGSEGV)
            done(r)
        """
    )
    told = compile_all(three(), cache_dir=tmp_path)
    words = "Check failed: tiles == 3"
    crash = fact("compiler-crashed", program="p1", signal="SIGSEGV", log=words)
    assert [t.problem for t in told] == [None, crash, None] and told[1].died
    assert started() == 2
    assert [t.problem for t in compile_all(three(), cache_dir=tmp_path)] == [None, crash, None]
    assert started() == 2  # remembered: it would crash again, after minutes


def test_a_child_that_ends_is_remembered_with_its_last_words(child, tmp_path):
    started = child("begin(requests[0]); raise SystemExit('out of ideas')")
    ended = fact("compiler-ended", program="replica", exit_code=1, log="out of ideas", signal="")
    for _ in range(2):
        assert compile_all([request_for()], cache_dir=tmp_path)[0].problem == ended
    assert started() == 1


def test_of_several_under_way_each_is_tried_alone(child, tmp_path):
    started = child(
        """
        for r in requests: begin(r)
        if "p1" in [r["name"] for r in requests]: os.kill(os.getpid(), signal.SIGKILL)
        for r in requests: done(r)
        """
    )
    told = compile_all(three(), cache_dir=tmp_path)
    assert [t.problem and t.problem.code for t in told] == [None, "compiler-killed", None]
    assert started() == 4
    compile_all(three(), cache_dir=tmp_path)  # the killed one is tried again: it may have been memory
    assert started() == 5


def test_a_child_that_is_killed_in_the_middle_of_its_answer_has_not_answered(child, tmp_path):
    child(
        """
        begin(requests[0])
        print('{"key": "half', end="", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    (told,) = compile_all([request_for()], cache_dir=tmp_path)
    assert told.problem.code == "compiler-killed"


def test_a_child_that_does_not_start_is_an_error(child, tmp_path):
    child("raise SystemExit('no module named that')")
    with refused(ChipwiseError, "compiler-not-started", exit_code=1, log="no module named that"):
        compile_all([request_for()], cache_dir=tmp_path)


def test_interrupting_ends_the_child(child, tmp_path):
    child("begin(requests[0]); done(requests[0]); import time; time.sleep(60)")

    def interrupt(done, total, name, left):
        if done:
            raise KeyboardInterrupt

    made = []
    start = compiler.subprocess.Popen
    compiler.subprocess.Popen = lambda *a, **k: made.append(start(*a, **k)) or made[-1]
    try:
        with pytest.raises(KeyboardInterrupt):
            compile_all(three(), cache_dir=tmp_path, progress=interrupt)
    finally:
        compiler.subprocess.Popen = start
    assert made[0].poll() == -signal.SIGKILL


def on_gpu(request):
    return dataclasses.replace(request, platform="cuda", topology={"target_config": "an A100"})


def test_two_kinds_of_compilers_run_side_by_side(child, tmp_path):
    place = tmp_path / "met"
    place.mkdir()
    started = child(
        f"""
        import time
        met = pathlib.Path({str(place)!r})
        (met / requests[0]["platform"]).touch()
        until = time.monotonic() + 60
        while len(list(met.iterdir())) < 2 and time.monotonic() < until: time.sleep(0.01)
        for r in requests: begin(r); done(r)
        """
    )
    told = compile_all([request_for(), on_gpu(request_for(name="other"))], cache_dir=tmp_path)
    assert [t.name for t in told] == ["replica", "other"] and started() == 2
    assert {p.name for p in tmp_path.glob("*.lock")} == {"compiler-tpu.lock", "compiler-cuda.lock"}
    assert {p.name for p in place.iterdir()} == {"tpu", "cuda"}


def test_one_that_fails_ends_the_other(child, tmp_path):
    child(
        """
        if requests[0]["platform"] == "tpu": raise SystemExit("no such library")
        import time; time.sleep(60)
        """
    )
    with refused(ChipwiseError, "compiler-not-started", chips="TPU", log="no such library"):
        compile_all([request_for(), on_gpu(request_for())], cache_dir=tmp_path)


# ---- which compiler is there


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Packages that are installed, by name, to be changed; and `ptxas`, in an empty package of NVIDIA's."""
    there = {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.2", "jax-cuda12-pjrt": "0.10.2"}
    monkeypatch.setattr(compilers, "installed", there.get)
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "ptxas").touch(mode=0o755)
    return there


def test_a_gpu_s_compiler_is_the_plugin_with_its_assembler(packages, tmp_path):
    found = compilers.gpu_compiler()
    assert found.path == str(tmp_path) and "0.10.2" in found.versions
    made = found.environment()
    assert made["PATH"].split(os.pathsep)[0] == str(tmp_path)
    assert (made["JAX_PLATFORMS"], made["CUDA_VISIBLE_DEVICES"]) == ("cpu", "-1")


def test_each_thing_in_the_way_of_a_gpu_s_compiler_is_one_line(packages, tmp_path):
    (tmp_path / "ptxas").unlink()
    with refused(DeviceError, "ptxas-missing", install="pip install nvidia-cuda-nvcc-cu12"):
        compilers.gpu_compiler()
    same = "pip install jax-cuda12-plugin==0.11.0 jax-cuda12-pjrt==0.11.0"
    packages["jaxlib"] = packages["jax"] = "0.11.0"
    with refused(DeviceError, "compiler-of-another-jax", package="jax-cuda12-plugin", install=same):
        compilers.gpu_compiler()
    packages["jax-cuda12-plugin"] = "0.11.0"
    with refused(DeviceError, "compiler-of-another-jax", package="jax-cuda12-pjrt", version="0.10.2"):
        compilers.gpu_compiler()
    packages["jax-cuda13-plugin"] = "0.11.0"
    uninstall = "pip uninstall jax-cuda12-plugin jax-cuda12-pjrt"
    with refused(DeviceError, "compilers-in-the-way", uninstall=uninstall):
        compilers.gpu_compiler()
    del packages["jax-cuda12-plugin"], packages["jax-cuda13-plugin"]
    with refused(DeviceError, "compiler-missing", install="pip install 'chipwise[plan-gpu]'"):
        compilers.gpu_compiler()


def test_where_a_gpu_host_has_a_plugin_that_one_compiles(packages, tmp_path):
    packages |= {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2", "jax-cuda12-plugin": None}
    assert "cuda13" in compilers.gpu_compiler().versions


def test_without_libtpu_the_pip_line_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(compilers, "installed", lambda package: None)
    with refused(DeviceError, "compiler-missing", install="pip install 'chipwise[plan-tpu]'"):
        compile_all([request_for()], cache_dir=tmp_path)


# ---- the lock


HOLD = """
import sys, time
from pathlib import Path
from chipwise.planner import compiler
with compiler._alone(Path(sys.argv[1]), "tpu"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    process.stdin.close()


def test_another_plan_is_waited_for(holder, child, tmp_path, capsys):
    started = child(ALL)
    threading.Timer(0.3, holder.stdin.close).start()
    assert compile_all([request_for()], cache_dir=tmp_path)[0].seconds == 7.0
    assert capsys.readouterr().err == f"{fact('compiler-waited-for', chips='TPU')}\n" and started() == 1
    holder.wait()


def test_a_holder_that_was_killed_holds_nothing(holder, child, tmp_path):
    child(ALL)
    holder.kill()
    holder.wait()
    assert compile_all([request_for()], cache_dir=tmp_path)[0].seconds == 7.0


# ---- what the child is told, and what it makes of a refusal


def test_the_child_knows_nothing_of_a_real_tpu(monkeypatch):
    for name in ("TPU_PROCESS_BOUNDS", "MEGASCALE_NUM_SLICES", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, "2,2,1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-32")
    made = compilers.child_environment("tpu")
    assert made["JAX_PLATFORMS"] == "cpu" and made["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert made["TPU_ACCELERATOR_TYPE"] == "v5litepod-8" and "HOME" in made
    assert not made.keys() & {"TPU_PROCESS_BOUNDS", "MEGASCALE_NUM_SLICES", "XLA_FLAGS"}
    assert "JAX_COMPILATION_CACHE_DIR" not in made
    assert (Path(made["PYTHONPATH"].split(os.pathsep)[0]) / "chipwise").is_dir()


def test_a_refusal_for_memory_is_read():
    early = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
        "(60.42G) exceeds available HBM (7.48G)."
    )
    problem = refusal("replica", early).problem
    assert problem.code == "refused-for-memory"
    assert (problem["needed"], problem["available"]) == (int(60.42 * 2**30), int(7.48 * 2**30))
    late = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 20.06G of 15.75G hbm. Exceeded hbm capacity by 4.31G.\n\nTotal hbm usage >= 20.31G:"
    )
    problem = refusal("replica", late).problem
    assert (problem["needed"], problem["available"]) == (int(20.06 * 2**30), int(15.75 * 2**30))
    assert problem["message"].startswith("RESOURCE_EXHAUSTED")


def test_another_refusal_keeps_its_first_lines():
    problem = fact("refused", program="update", message="UNIMPLEMENTED: no such thing in that op")
    answer = refusal("update", "UNIMPLEMENTED: no such thing\n\n  in that op\nmore\n", 2.0)
    assert answer == Compiled("update", problem, compile_seconds=2.0)


@pytest.mark.parametrize(
    "message, code",
    [
        ("Cannot find a lowering rule: lowering platform tpu", "refused-callback"),
        ("While rewriting computation to not contain X64 element types: F64", "refused-float64"),
        ("Unsupported element type F16", "refused-float16"),
        ("Dynamic shape is not supported", "refused-dynamic-shape"),
        ("No registered implementation for custom call to x", "refused-custom-call"),
    ],
)
def test_a_refusal_that_is_known_has_a_code_of_its_own(message, code):
    problem = refusal("replica", message).problem
    assert problem.code == code and problem["message"] == message and message in str(problem)


def test_answers_are_plain_json():
    notes, kernel = [fact("program-sort", shape="x")], Kernel("gemm", "matmul", shape=(1, 1, 1, 1))
    problem = fact("refused", program="replica", message="no")
    answer = Compiled("replica", problem, notes=notes, kernels=[kernel])
    assert Compiled.from_json(json.loads(json.dumps(answer.json()))) == answer


def test_lines_follow_a_program_that_moved_without_another_compilation():
    def compiled(source):
        scope = {"jnp": jnp}
        exec(compile(source, "net.py", "exec"), scope)
        return export_program(scope["f"], [jax.ShapeDtypeStruct((2, 2), jnp.float32)], "cpu")

    old, new = (compiled("\n" * gap + "def f(x):\n    y = jnp.sin(x)\n    return y @ y\n") for gap in (0, 7))
    assert old.key == new.key and "net.py:2" in old.places and "net.py:9" in new.places
    kernels = [Kernel("sin", "elementwise", line="net.py:2"), Kernel("dot", "matmul", line="net.py:3")]
    answer = Compiled("replica", kernels=kernels, places=list(old.places))
    assert [k.line for k in answer.at(new.places).kernels] == ["net.py:9", "net.py:10"]
    assert answer.at(old.places) == answer
    assert [k.line for k in answer.at(new.places[1:]).kernels] == ["", ""]  # which is which nobody knows
    before = dataclasses.replace(answer, places=[])  # remembered before places were
    assert before.at(new.places) == before
