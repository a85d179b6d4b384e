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
        # A link that stops answering: the first 30 examples are there, then nothing for an hour
        if os.environ["HANG"] == "1" and len(os.listdir(os.environ["SEEN"])) > 30:
            time.sleep(3600)
        open(f"{os.environ['SEEN']}/{time.time_ns()}", "w").close()
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
    (tmp_path / "seen").mkdir()
    command = [sys.executable, "-c", "from chipwise.cli import main; main()", "train", "scans.py:recipe"]
    command += ["--run", "run", "--feed", "host", "--workers", workers, "--devices", "cpu", "--quiet"]
    environment = {**os.environ, "HANG": hang, "SEEN": str(tmp_path / "seen"), "XLA_FLAGS": ""}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "seen").iterdir())) <= 30 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(8)  # until it is compiled, and waits or trains
    os.killpg(process.pid, number)  # as a terminal, systemd and scancel do
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "; saved. Resume with --run " in said
    assert any(p.name.isdigit() for p in (tmp_path / "run" / "checkpoints").iterdir())
