"""The link between two hosts, each in a network namespace of this machine, is cut (needs root and `ip`)."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import chipwise as cw
import processes
import tasks

SILENCE = 8
NAMES = [f"chipwise-{os.getpid()}-{i}" for i in range(2)]
MAIN = "from chipwise.cli import main; main()"
RECIPE = f"{Path(__file__).parents[1] / 'tasks.py'}:long"


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def possible():
    if os.geteuid() or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0


@pytest.fixture
def namespaces():
    files = [Path("/etc/netns") / name for name in NAMES]
    try:
        for i, (name, file) in enumerate(zip(NAMES, files, strict=True)):
            ip("netns", "add", name)
            file.mkdir(parents=True)  # `ip netns exec` shows it as /etc/hosts
            (file / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.{i + 1} {socket.gethostname()}\n")
        ip("link", "add", "cw0", "netns", NAMES[0], "type", "veth", "peer", "name", "cw1", "netns", NAMES[1])
        for i, name in enumerate(NAMES):
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", f"cw{i}")
            ip("-n", name, "link", "set", f"cw{i}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield NAMES
    finally:
        for name, file in zip(NAMES, files, strict=True):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(file, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not possible(), reason="needs root and network namespaces")
def test_a_cut_link_ends_both_hosts_and_the_run_goes_on(namespaces, tmp_path):
    run, started = tmp_path / "run", []
    how = ["--run", str(run), "--checkpoint-every", "10st", "--eval-every", "end", "--quiet", "--json"]
    for i, name in enumerate(namespaces):
        told = {"CHIPWISE_HOSTS": "2", "CHIPWISE_HOST": str(i), "CHIPWISE_COORDINATOR": "10.77.0.1:8482"}
        told |= {"CHIPWISE_WAIT": "120", "CHIPWISE_SILENCE": str(SILENCE), "JAX_NUM_CPU_DEVICES": "1"}
        kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
        command = ["ip", "netns", "exec", name, sys.executable, "-c", MAIN, "train", RECIPE, *how]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=kept | told | {"JAX_PLATFORMS": "cpu"}, **pipes))
    limit = time.monotonic() + 300
    while not any(p.name.isdigit() for p in (run / "checkpoints").glob("*")) and time.monotonic() < limit:
        time.sleep(0.05)
    ip("-n", namespaces[0], "link", "set", "cw0", "down")
    cut = time.monotonic()
    for one in started:
        one.wait(SILENCE + 60)
    assert time.monotonic() - cut < SILENCE + 10
    ends = processes.ends(started)
    assert [code for code, _, _ in ends] == [cw.HostLost.exit_code] * 2, ends
    assert [err.count("error: host") for _, _, err in ends] == [1, 1]
    program = f"import sys; sys.argv = ['chipwise', 'train', {RECIPE!r}, *{how!r}]; {MAIN}"
    said = processes.answer(processes.start(program, 2, 2))
    whole = cw.fit(tasks.long(), on=cw.On(devices=1), progress="none", eval_every=None)
    assert said["fingerprint"] == whole.fingerprint
