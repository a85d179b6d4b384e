import errno
import io
import os
import signal
import subprocess
import sys
import threading

import pytest

from chipwise.base.errors import ChipwiseError, DataError, DeviceError
from chipwise.base.facts import fact
from chipwise.compile import processes
from chipwise.compile.cache import compile_each
from planner.asked import ALL, compile_all, on_gpu, request_for, three
from refusals import refused


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
    assert [t.problem for t in told] == [None, crash, None] and started() == 2


@pytest.mark.parametrize(
    "death, problem",
    [
        (
            "raise SystemExit('out of ideas')",
            fact("compiler-ended", exit_code=1, log="out of ideas", signal=""),
        ),
        ("os.abort()", fact("compiler-crashed", log="", signal="SIGABRT")),
        ("os.kill(os.getpid(), signal.SIGSEGV)", fact("compiler-crashed", log="", signal="SIGSEGV")),
        ("os.kill(os.getpid(), signal.SIGKILL)", fact("compiler-killed", log="", signal="SIGKILL")),
        (
            "failed = dict(code='compiler-failed', numbers={})\n"
            "say(requests[0], dict(name='replica', notes=[], problem=failed))",
            fact("compiler-failed"),
        ),
    ],
)
def test_a_failure_of_this_machine_is_told_and_forgotten(child, tmp_path, death, problem):
    started = child(f"begin(requests[0])\n{death}")
    (told,) = compile_all([request_for()], cache_dir=tmp_path)
    assert told.problem == fact(problem.code, program="replica", **problem.numbers) and started() == 1
    child(ALL)
    (again,) = compile_all([request_for()], cache_dir=tmp_path)
    assert again.problem is None and again.temp_bytes == 7


def test_what_the_compiler_says_of_a_program_is_kept(child, tmp_path):
    problem = "problem=dict(code='refused', numbers=dict(message='INVALID_ARGUMENT: no'))"
    started = child(f"begin(requests[0]); say(requests[0], dict(name='replica', notes=[], {problem}))")
    for _ in range(2):
        assert compile_all([request_for()], cache_dir=tmp_path)[0].problem.code == "refused"
    assert started() == 1


def test_a_machine_that_cannot_start_the_compiler_says_why(child, monkeypatch, tmp_path):
    child(ALL)
    reason = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def start(*_, **__):
        raise reason

    monkeypatch.setattr(processes.subprocess, "Popen", start)
    with refused(DeviceError, "compiler-cannot-run", chips="TPU", reason=str(reason)):
        compile_all([request_for()], cache_dir=tmp_path)


def test_a_cache_that_cannot_be_made_is_a_line(child, tmp_path):
    child(ALL)
    (tmp_path / "file").touch()
    with refused(DataError, "plan-cache-unwritable", path=tmp_path / "file" / "plan"):
        compile_all([request_for()], cache_dir=tmp_path / "file" / "plan")


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

    def interrupt(done, total):
        if done:
            raise KeyboardInterrupt

    made = []
    start = processes.subprocess.Popen
    processes.subprocess.Popen = lambda *a, **k: made.append(start(*a, **k)) or made[-1]
    try:
        with pytest.raises(KeyboardInterrupt):
            compile_all(three(), cache_dir=tmp_path, progress=interrupt)
    finally:
        processes.subprocess.Popen = start
    assert made[0].poll() == -signal.SIGKILL


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


def test_one_that_ends_too_early_is_an_error(child, tmp_path):
    script = child(ALL)
    (tmp_path / "child.py").write_text("raise SystemExit('no such plugin')")
    with refused(ChipwiseError, "compiler-not-started", exit_code=1, log="no such plugin"):
        compile_all([request_for()], cache_dir=tmp_path)
    assert script() == 0


def test_a_terminals_interruption_does_not_reach_the_child(child, tmp_path):
    child("assert os.getpgrp() == os.getpid()\n" + ALL)
    assert compile_all([request_for()], cache_dir=tmp_path)[0].temp_bytes == 7


def test_after_an_interruption_no_child_starts(holder, child, tmp_path, capsys):
    started = child(ALL)
    answers = compile_each([on_gpu(request_for()), request_for()], cache_dir=tmp_path)
    assert next(answers)[1].temp_bytes == 7
    (waiting,) = [one for one in threading.enumerate() if one.name == "compiler-tpu"]
    answers.close()
    holder.stdin.close()
    waiting.join(60)
    assert not waiting.is_alive() and started() == 1
    assert capsys.readouterr().err == f"{fact('compiler-waited-for', chips='TPU')}\n"


def test_one_that_fails_ends_the_other(child, tmp_path):
    child(
        """
        if requests[0]["platform"] == "tpu": raise SystemExit("no such library")
        import time; time.sleep(60)
        """
    )
    with refused(ChipwiseError, "compiler-not-started", chips="TPU", log="no such library"):
        compile_all([request_for(), on_gpu(request_for())], cache_dir=tmp_path)


# ---- the lock


HOLD = """
import sys, time
from pathlib import Path
from chipwise.base.locks import Lock
lock = Lock(Path(sys.argv[1]) / "compiler-tpu.lock", print)
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


def test_another_plan_is_waited_for(holder, child, tmp_path, monkeypatch):
    class Told(io.StringIO):
        def write(self, text):
            holder.stdin.close()  # whoever is told that it waits need not wait any longer
            return super().write(text)

    started, told = child(ALL), Told()
    monkeypatch.setattr(sys, "stderr", told)
    assert compile_all([request_for()], cache_dir=tmp_path)[0].temp_bytes == 7
    assert told.getvalue() == f"{fact('compiler-waited-for', chips='TPU')}\n" and started() == 1
    holder.wait()


def test_a_holder_that_was_killed_holds_nothing(holder, child, tmp_path):
    child(ALL)
    holder.kill()
    holder.wait()
    assert compile_all([request_for()], cache_dir=tmp_path)[0].temp_bytes == 7
