"""A SLURM of one node, set up on this machine by `tools/slurm_here.sh`, runs and stops chipwise for real."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import chipwise as cw
import processes
import tasks
from chipwise.chips.targets import parse
from chipwise.launch.launch_job import LaunchJob
from chipwise.launch.places import place, write
from chipwise.recipes import digits

MISSING = os.geteuid() or not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "srun")))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(MISSING, reason="needs root and SLURM: apt-get install slurm-wlm munge"),
]

SCRIPT = Path(__file__).parents[2] / "tools" / "slurm_here.sh"
LONG = f"{Path(__file__).parents[1] / 'tasks.py'}:long"
HOW = ["--checkpoint-every", "10st", "--eval-every", "end", "--quiet", "--json"]
CHIPWISE = f'#!/bin/sh\nexec {sys.executable} -c "from chipwise.cli import main; main()" "$@"\n'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The environment of a user of it."""
    folder = tmp_path_factory.mktemp("slurm") / "here"
    subprocess.run(["bash", SCRIPT, "up", folder], check=True, timeout=60)
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    told = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": processes.search()}
    yield {**kept, **told, "SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run(["bash", SCRIPT, "down", folder], check=True, timeout=60)


@pytest.fixture
def chipwise(tmp_path):
    """The command, as an installed one stands on the PATH."""
    program = tmp_path / "chipwise-tasks-env" / "bin" / "chipwise"
    program.parent.mkdir(parents=True)
    program.write_text(CHIPWISE)
    program.chmod(0o755)
    (program.parents[1] / "wanted").write_text("chipwise\n")  # it is installed
    return program


def srun(cluster, chipwise, *words, tasks=2):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    name = f"--job-name={chipwise.parents[2].name}"
    command = ["srun", name, "--kill-on-bad-exit=0", f"--ntasks={tasks}", chipwise, *words]
    return subprocess.Popen(list(map(str, command)), env=cluster, **pipes)


def wait_for_checkpoint(run):
    limit = time.monotonic() + 240
    while not any(p.name.isdigit() for p in (run / "checkpoints").glob("*")):
        assert time.monotonic() < limit
        time.sleep(0.05)


def scancel(cluster, name):
    """As an administrator's preemption does: SIGTERM to the tasks, not to the script around them."""
    subprocess.run(["scancel", "--signal=TERM", "--name", name], check=True, env=cluster, timeout=30)


def test_two_tasks_train_digits_as_one_process(cluster, chipwise, tmp_path):
    words = ["train", "digits", "--set", "duration=2ep", "--run", tmp_path / "run", "--quiet", "--json"]
    said = processes.answer([srun(cluster, chipwise, *words)])
    alone = cw.fit(dataclasses.replace(digits.recipe(), duration="2ep"), on=cw.On(devices=1), progress="none")
    assert said["fingerprint"] == alone.fingerprint
    assert (said["devices"]["hosts"], said["devices"]["count"]) == (2, 4)


@pytest.fixture(scope="module")
def whole():
    return cw.fit(tasks.long(), on=cw.On(devices=1), progress="none", eval_every=None).fingerprint


def test_a_signal_by_scancel_saves_and_the_same_command_goes_on(cluster, chipwise, whole, tmp_path):
    run = tmp_path / "run"
    words = ["train", LONG, "--run", run, *HOW]
    stopped = srun(cluster, chipwise, *words)
    wait_for_checkpoint(run)
    scancel(cluster, tmp_path.name)
    ((code, _, said),) = processes.ends([stopped], 120)
    assert code == cw.errors.Stopped.exit_code, said
    assert not (run / "result.json").exists()
    assert processes.answer([srun(cluster, chipwise, *words, tasks=1)])["fingerprint"] == whole


JOB = LaunchJob(name="chipwise-tasks", target=parse("h100"), words=(LONG, *HOW), packages=("chipwise",))


def submitted(cluster, folder):
    """Queues `JOB`."""
    for name, text in write(place("slurm"), JOB).items():
        (folder / name).write_text(text)
    script = f"{JOB.name}.sbatch"
    subprocess.run(["sbatch", script], check=True, cwd=folder, env=cluster, timeout=30)


def test_the_written_script_is_stopped_queued_again_and_ends(cluster, chipwise, whole, tmp_path):
    submitted(cluster, tmp_path)
    run = tmp_path / "runs" / JOB.name
    wait_for_checkpoint(run)
    scancel(cluster, JOB.name)
    limit = time.monotonic() + 300
    while not (run / "result.json").exists():
        assert time.monotonic() < limit, [log.read_text() for log in tmp_path.glob("*.log")]
        time.sleep(0.2)
    assert json.loads((run / "result.json").read_text())["fingerprint"] == whole
    assert len((run / "processes.jsonl").read_text().splitlines()) > 1


def test_the_written_script_goes_on_at_once_after_a_kill(cluster, chipwise, whole, tmp_path):
    submitted(cluster, tmp_path)
    run = tmp_path / "runs" / JOB.name
    wait_for_checkpoint(run)
    pid = json.loads((run / "processes.jsonl").read_text().splitlines()[0])["pid"]
    os.kill(pid, signal.SIGKILL)
    killed, limit = time.monotonic(), time.monotonic() + 300
    starts = []
    while not (run / "result.json").exists():
        assert time.monotonic() < limit, [log.read_text() for log in tmp_path.glob("*.log")]
        if len(starts := (run / "processes.jsonl").read_text().splitlines()) == 1:
            begun = time.monotonic()
        time.sleep(0.05)
    print(f"{begun - killed:.1f} s from the kill to the next start, in the same job")
    assert [json.loads(line)["event"] for line in starts][:2] == ["start", "start"]
    assert json.loads((run / "result.json").read_text())["fingerprint"] == whole
    assert len(list(tmp_path.glob("*.log"))) == 1


def test_sbatch_reads_what_was_written(cluster, tmp_path):
    name = f"{JOB.name}.sbatch"
    for target in ("h100", "a100:8"):
        job = dataclasses.replace(JOB, target=parse(target), sbatch=("--begin=now+1hour", "--nice=10"))
        text = write(place("slurm"), job)[name]
        (tmp_path / name).write_text(text)
        assert accepted(cluster, tmp_path, name) == 0
    for wrong in (text.replace("--nodes=1", "--nodes=2"), text.replace("--begin=now", "--begin=once")):
        (tmp_path / name).write_text(wrong)  # it has one node
        assert accepted(cluster, tmp_path, name) != 0


def accepted(cluster, folder, name):
    """What `sbatch` says of a script, without queueing it."""
    return subprocess.run(["sbatch", "--test-only", name], cwd=folder, env=cluster, timeout=120).returncode
