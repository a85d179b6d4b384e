"""A run killed at any moment goes on, on other devices, as if nothing had happened.

Twenty runs of the digits recipe are ended by SIGKILL, four kinds of moments five times each: before
training, somewhere in it, while a checkpoint is being written, and at the end. Each is resumed on
another number of devices and must end with the fingerprint of the run that nobody killed.
"""

import json
import os
import random
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 150
COUNTS = (1, 2, 4, 8)
MOMENTS = ("start", "training", "saving", "end")


class Digits:
    """Starts `chipwise train digits` in processes that share one cache of compiled programs."""

    def __init__(self, cache):
        self.env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def start(self, folder, count):
        command = [sys.executable, "-c", "from chipwise.cli import main; main()", "train", "digits"]
        command += ["--run", str(folder), "--simulate", str(count), "--set", f"duration={STEPS}st"]
        command += ["--checkpoint-every", "5st", "--eval-every", "50st", "--quiet", "--json"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=self.env, text=True, **pipes)

    def finish(self, folder, count):
        """Lets it run to its end; *returns* what it says."""
        out, err = self.start(folder, count).communicate(timeout=300)
        assert "Traceback" not in err
        return json.loads(out), err


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return Digits(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory):
    """What the runs that nobody killed say, by device count: all the same."""
    said = {n: digits.finish(tmp_path_factory.mktemp("whole") / "run", n)[0] for n in COUNTS}
    assert len({s["fingerprint"] for s in said.values()}) == 1
    return said[1]


def wait_for(process, happened, limit=120.0):
    began = time.monotonic()
    while not happened() and process.poll() is None and time.monotonic() - began < limit:
        time.sleep(0.001)


def names(folder):
    try:
        return os.listdir(folder / "checkpoints")
    except FileNotFoundError:
        return []


def wait_until(moment, process, folder, rng):
    if moment == "start":
        time.sleep(rng.uniform(0.1, 4.0))
    elif moment == "training":
        wait_for(process, lambda: any(name.isdigit() for name in names(folder)))
        time.sleep(rng.uniform(0.0, 1.0))
    elif moment == "saving":
        at = rng.randrange(2, 8)  # a later one now and then, when older ones are being deleted too
        wait_for(process, lambda: len([n for n in names(folder) if n.isdigit()]) >= min(at, 3))
        time.sleep(rng.uniform(0.0, 0.3))
        wait_for(process, lambda: any(not name.isdigit() for name in names(folder)))
        time.sleep(rng.uniform(0.0, 0.01))
    else:
        wait_for(process, lambda: any(str(STEPS) in name for name in names(folder)))
        time.sleep(rng.uniform(0.0, 0.5))


@pytest.mark.drawn
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("seed", range(5))
def test_a_killed_run_ends_with_the_same_fingerprint(digits, whole, tmp_path, moment, seed):
    rng = random.Random(f"{moment} {seed}")
    first, then = rng.sample(COUNTS, 2)
    process = digits.start(tmp_path / "run", first)
    wait_until(moment, process, tmp_path / "run", rng)
    process.kill()
    process.communicate()
    said, err = digits.finish(tmp_path / "run", then)
    assert err == ""  # nothing that was left behind is called damaged
    assert said["fingerprint"] == whole["fingerprint"]
    assert said["metrics"]["train/loss"] == whole["metrics"]["train/loss"]
    assert said["metrics"]["eval/accuracy"] == whole["metrics"]["eval/accuracy"]
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == sorted(steps) and steps[-1] == STEPS


def test_a_run_killed_again_and_again_gets_there_too(digits, whole, tmp_path):
    rng = random.Random(0)
    for i in range(6):
        process = digits.start(tmp_path / "run", COUNTS[i % 4])
        wait_until("training" if i % 2 else "start", process, tmp_path / "run", rng)
        process.kill()
        process.communicate()
    said, _ = digits.finish(tmp_path / "run", 2)
    assert said["fingerprint"] == whole["fingerprint"]
    again, _ = digits.finish(tmp_path / "run", 4)
    assert again["seconds"]["train"] == 0
    assert (again["fingerprint"], again["metrics"]) == (said["fingerprint"], said["metrics"])
