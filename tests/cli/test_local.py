"""Processes of `--processes` end with it, however it ends, and it goes on with those that are left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import typer

import chipwise as cw
import processes
import tasks
from chipwise.cli import local

CHILD = """
import os, signal, sys, time
from chipwise.cli import local
local.SILENCE_SECONDS = local._GRACE_SECONDS = 0.1
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
local.end_with_parent(int(sys.argv[1]))
print("up", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]]).wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
@pytest.mark.parametrize("how", ["listens", "deaf"])
def test_a_killed_parent_leaves_no_process(how):
    pipes = {"stdout": subprocess.PIPE, "start_new_session": True}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, how], **pipes)
    try:
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
        assert parent.communicate(timeout=20) == (b"", None)  # the last writer of the pipe has ended
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)


def test_a_process_whose_parent_was_killed_before_it_began_ends_at_once():
    done = subprocess.run([sys.executable, "-c", CHILD, "1", "listens"], stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, b"")


def test_a_lost_process_of_one_cannot_rejoin(chipwise):
    said = chipwise("--rejoin", "--restart", "2", "devices")
    assert said.code == 2 and "--processes" in said.err


@pytest.mark.parametrize(
    ("count", "rejoin", "rounds", "counts"),
    [
        (3, False, [[-9, 76, 76], [76, -9], [0, 0]], [3, 2, 2]),  # the first is back when the second is lost
        (3, False, [[-9, 76, 76], [75, 75], [0, 0, 0]], [3, 2, 3]),
        (3, True, [[-9, 76, 76], [77, 77, 77], [0, 0, 0]], [3, 3, 3]),
        (2, False, [[-9, -9], [76, -9], [-9]], [2, 2, 1]),  # none is left: all begin again
        (None, False, [[77], [-9], [0]], [None, None, None]),
        (2, False, [[2, 2]], [2]),  # an error would come again
    ],
)
def test_a_restart_goes_on_with_those_that_are_left(monkeypatch, count, rejoin, rounds, counts):
    started = []

    def run(command, count, signals):
        started.append(count)
        return rounds[len(started) - 1]

    monkeypatch.setattr(local, "_run", run)
    monkeypatch.setattr(local.signal, "signal", lambda *_: None)
    with pytest.raises(typer.Exit) as caught:
        local.run_local(["train"], count, 2, rejoin)
    assert started == counts
    assert caught.value.exit_code == {0: 0, 2: 2, -9: 137}[max(rounds[-1])]


LONG = f"{Path(__file__).parents[1] / 'tasks.py'}:long"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rejoin", [[], ["--rejoin"]])
def test_a_killed_host_of_three_leaves_two_and_the_same_bits(tmp_path, rejoin):
    """Prints the seconds from the kill to the next step."""
    how = [
        "--run",
        tmp_path / "run",
        "--log-every",
        "1st",
        "--checkpoint-every",
        "20st",
        "--eval-every",
        "end",
    ]
    command = ["--processes", "3", "--restart", "2", *rejoin, "train", LONG, *how, "--quiet", "--json"]
    begin = [sys.executable, "-c", "from chipwise.cli import main; main()", *map(str, command)]
    environment = processes.environment(JAX_PLATFORMS="cpu", CHIPWISE_CACHE=str(tmp_path / "cache"))
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # as a user's, whose kept programs all share
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    parent = subprocess.Popen(begin, env=environment, **pipes)
    rows = tmp_path / "run" / "metrics.jsonl"

    def after(step, old=frozenset()):
        limit = time.monotonic() + 240
        while not any(json.loads(row)["step"] > step for row in set(lines()) - old):
            assert parent.poll() is None and time.monotonic() < limit, parent.communicate()
            time.sleep(0.01)

    def lines():
        return [
            row for row in (rows.read_text() if rows.exists() else "").splitlines(True) if row[-1] == "\n"
        ]

    after(100)
    here = next(child for child in psutil.Process(parent.pid).children() if _index(child) == 1)
    here.kill()
    killed, old = time.monotonic(), set(lines())
    after(0, old | set(lines()))
    print(f"{time.monotonic() - killed:.1f} s from the kill of host 1 of 3 to the next step {rejoin}")
    out, err = parent.communicate(timeout=400)
    said = json.loads(out.splitlines()[-1])
    alone = cw.fit(tasks.long(), on=cw.On(devices=1), progress="none", eval_every=None)
    assert parent.returncode == 0 and said["fingerprint"] == alone.fingerprint, err
    assert said["devices"]["hosts"] == (3 if rejoin else 2)


def _index(process):
    return int(process.environ().get("CHIPWISE_HOST", "-1"))


def test_a_process_imports_nothing_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "chipwise.py").write_text("raise SystemExit(9)")  # perhaps of somebody else
    monkeypatch.chdir(tmp_path)
    assert local._run(["--help"], 1, []) == [0]
