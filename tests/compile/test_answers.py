import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from chipwise.base.facts import fact
from chipwise.compile.answers import FAILED_HERE, Answer, CompileRequest, refusal
from chipwise.compile.exports import export_program
from chipwise.compile.hlo.kernel import Kernel
from chipwise.planner.compile_step import collective
from chipwise.step.reduce import Exchange
from planner.asked import SPEC, V5E, product, request_for


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


@pytest.mark.slow
def test_the_key_is_the_same_in_another_process():
    code = (
        "import jax, jax.numpy as jnp\n"
        "from chipwise.compile.exports import export_program\n"
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
        CompileRequest("replica", {"topology_name": "v2:2x2"}, base.program),
        CompileRequest("replica", V5E, collective(Exchange("reduce", 8, 10, 1, True))),
        CompileRequest("replica", V5E, collective(Exchange("reduce", 8, 10, 1, False))),
    ]
    keys = [r.key("jax 1") for r in [base, *others]] + [base.key("jax 2")]
    assert len(set(keys)) == len(keys)
    assert CompileRequest("other name", V5E, base.program).key("jax 1") == base.key("jax 1")


def test_a_refusal_for_memory_is_read():
    early = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
        "(60.42G) exceeds available HBM (7.48G)."
    )
    problem = refusal("replica", RuntimeError(early)).problem
    assert problem.code == "refused-for-memory"
    assert (problem["needed"], problem["available"]) == (int(60.42 * 2**30), int(7.48 * 2**30))
    late = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 20.06G of 15.75G hbm. Exceeded hbm capacity by 4.31G.\n\nTotal hbm usage >= 20.31G:"
    )
    problem = refusal("replica", RuntimeError(late)).problem
    assert (problem["needed"], problem["available"]) == (int(20.06 * 2**30), int(15.75 * 2**30))
    assert problem["message"].startswith("RESOURCE_EXHAUSTED")


def test_another_refusal_keeps_its_first_lines():
    problem = fact("refused", program="update", message="UNIMPLEMENTED: no such thing in that op")
    answer = refusal("update", RuntimeError("UNIMPLEMENTED: no such thing\n\n  in that op\nmore\n"))
    assert answer == Answer("update", problem)


@pytest.mark.parametrize(
    "platform, message, code, option",
    [
        ("tpu", "While rewriting a computation to not contain X64 types: F64", "float64", "precision=f32"),
        ("tpu", "Unsupported element type F16", "float16", "precision=bf16"),
        ("tpu", "Dynamic shape is not supported", "dynamic-shape", None),
        ("tpu", "No registered implementation for custom call to x", "custom-call", None),
        ("cuda", "HLO instruction x does not have a deterministic implementation", "exact", "--no-exact"),
        ("cuda", "Triton support checks failed", "triton", None),
    ],
)
def test_a_refusal_that_is_known_has_a_code_and_names_the_option(platform, message, code, option):
    problem = refusal("replica", ValueError(message), platform).problem
    assert problem.code == f"refused-{code}" and problem["message"] == message
    assert message in str(problem) and (option or "") in str(problem)
    assert refusal(
        "replica", RuntimeError(f"UNIMPLEMENTED: {message}"), platform
    ).problem == dataclasses.replace(
        problem, numbers={**problem.numbers, "message": f"UNIMPLEMENTED: {message}"}
    )
    other = refusal("replica", ValueError(message), {"tpu": "cuda", "cuda": "tpu"}[platform]).problem
    assert other.code == "refused"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "RESOURCE_EXHAUSTED: /tmp/tempfile-vm-1; No space left on device Unable to write PTX contents"
        ),
        RuntimeError("OUT_OF_RANGE: /tmp/tempfile-vm-1; File too large Unable to write PTX contents"),
        RuntimeError("INTERNAL: ptxas exited with non-zero error code 9"),
        RuntimeError("FAILED_PRECONDITION: cannot load the dynamic library: Too many open files"),
        RuntimeError("can't start new thread"),
        RuntimeError("std::bad_alloc"),
        MemoryError(),
        RecursionError("maximum recursion depth exceeded"),
        OSError(28, "No space left on device"),
    ],
)
def test_what_this_machine_lacks_is_no_refusal(error):
    for platform, code in (("tpu", "refused"), ("cuda", "refused"), ("", "topology-unknown")):
        problem = refusal("replica", error, platform, code).problem
        assert problem.code == "compiler-failed" and problem.code in FAILED_HERE


def test_answers_are_plain_json():
    notes, kernel = [fact("program-sort", shape="x")], Kernel("gemm", "matmul", shape=(1, 1, 1, 1))
    problem = fact("refused", program="replica", message="no")
    answer = Answer("replica", problem, notes=notes, kernels=[kernel])
    assert Answer.from_json(json.loads(json.dumps(dataclasses.asdict(answer)))) == answer


def test_lines_follow_a_program_that_moved_without_another_compilation():
    def compiled(source):
        scope = {"jnp": jnp}
        exec(compile(source, "net.py", "exec"), scope)
        return export_program(scope["f"], [jax.ShapeDtypeStruct((2, 2), jnp.float32)], "cpu")

    old, new = (compiled("\n" * gap + "def f(x):\n    y = jnp.sin(x)\n    return y @ y\n") for gap in (0, 7))
    assert old.key == new.key and "net.py:2" in old.places and "net.py:9" in new.places
    kernels = [Kernel("sin", "elementwise", line="net.py:2"), Kernel("dot", "matmul", line="net.py:3")]
    answer = Answer("replica", kernels=kernels, places=list(old.places))
    assert [k.line for k in answer.at(new.places).kernels] == ["net.py:9", "net.py:10"]
    assert answer.at(old.places) == answer
    assert [k.line for k in answer.at(new.places[1:]).kernels] == ["", ""]  # which is which nobody knows
    before = dataclasses.replace(answer, places=[])  # remembered before places were
    assert before.at(new.places) == before
