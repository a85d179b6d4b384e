"""Processes of `run-local` end with it, however it ends."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

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
