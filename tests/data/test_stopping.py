"""A run that waits for its data, or is read by processes, is stopped and saved like any other."""

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow

RECIPE = """
import os
import time
import jax.numpy as jnp
import numpy as np
import chipwise as cw


class Scans:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        # A link that stops answering: once the run has saved, nothing for an hour
        if os.environ["HANG"] == "1" and os.path.isdir("run/checkpoints/500"):
            time.sleep(3600)
        return {"x": np.full(3, i, np.float32), "label": np.int32(i % 2)}


def loss(params, state, batch, key, train):
    error = cw.losses.softmax_cross_entropy(batch["x"] @ params["w"], batch["label"])
    return {"loss": cw.Sum.of(error)}, state


def recipe():
    task = cw.Task(init=lambda key: ({"w": jnp.zeros((3, 2))}, {}), loss=loss, train=Scans())
    return cw.Recipe(task=task, batch=8, duration="200000st", optimizer=cw.sgd(lr=1e-6))
"""


@pytest.mark.parametrize("workers,hang", [("threads:1", "1"), ("processes:2", "0")])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_saves(tmp_path, workers, hang, number):
    (tmp_path / "scans.py").write_text(RECIPE)
    command = [sys.executable, "-c", "from chipwise.cli import main; main()", "train", "scans.py:recipe"]
    command += ["--run", "run", "--feed", "host", "--workers", workers, "--devices", "cpu", "--quiet"]
    command += ["--checkpoint-every", "500st"]
    environment = {**os.environ, "HANG": hang, "XLA_FLAGS": ""}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "checkpoints" / "500").is_dir():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(3)  # until it waits for what it has not read ahead
    os.killpg(process.pid, number)  # as a terminal, systemd and scancel do
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "; saved. Resume with --run " in said
    saved = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()]
    assert max(saved) > 500
