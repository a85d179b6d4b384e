"""A run asked to stop saves itself, says how to go on, and ends as if nobody had asked."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import chipwise as cw
import tasks
from chipwise.cli import main
from chipwise.engine.programs import Programs
from chipwise.engine.run_folder import RunFolder
from chipwise.engine.signals import StopRequest
from chipwise.words.facts import fact
from refusals import refused

TESTS = Path(__file__).parents[1]
FILE = """
import os
import time

import chipwise as cw
import tasks

def recipe(slow: bool = False):
    if slow:  # stands for a large model: a save that takes long
        from chipwise.engine.checkpoint import Checkpoints
        Checkpoints.save = lambda *_: time.sleep(120)
    return tasks.recipe(task=tasks.task(loss=tasks.plain_loss, augment=None, eval=None), duration="400000st")
"""


def plain(**changes):
    """The small task at its quickest to compile."""
    task = tasks.task(loss=tasks.plain_loss, augment=None, eval=None)
    return tasks.recipe(task=task, **changes)


QUIET = {"on": cw.On(devices=1), "log_every": "4st", "eval_every": None, "progress": "none"}


@pytest.fixture(scope="module")
def whole():
    return cw.fit(plain(), **QUIET)


def test_a_stopped_run_is_saved_and_resumes_to_the_same_bits_on_other_devices(whole, tmp_path, monkeypatch):
    log = RunFolder.log

    def log_and_stop(self, row):
        log(self, row)
        if row["step"] == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunFolder, "log", log_and_stop)
    before = signal.getsignal(signal.SIGTERM)
    with refused(cw.errors.Stopped, "stopped", signal="SIGTERM", total=30, run=str(tmp_path)):
        cw.fit(plain(), tmp_path, **QUIET)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "result.json").exists()
    monkeypatch.undo()
    assert 12 < cw.engine.restore_run(plain(), tmp_path).steps < 30
    resumed = cw.fit(plain(), tmp_path, **(QUIET | {"on": cw.On(devices=2)}))
    assert resumed.fingerprint == whole.fingerprint
    assert resumed.metrics["train/loss"] == whole.metrics["train/loss"]


def test_a_signal_while_compiling_stops_before_the_first_step(whole, tmp_path, monkeypatch):
    compile = Programs.compile

    def compile_and_stop(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        compile(self, *arguments)

    monkeypatch.setattr(Programs, "compile", compile_and_stop)
    with refused(cw.errors.Stopped, "stopped", step=0, total=30):
        cw.fit(plain(), tmp_path, **QUIET)
    monkeypatch.undo()
    assert cw.fit(plain(), tmp_path, **QUIET).fingerprint == whole.fingerprint


def test_without_a_folder_it_says_that_nothing_is_saved(monkeypatch):
    step = Programs.step

    def step_and_stop(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *arguments)

    monkeypatch.setattr(Programs, "step", step_and_stop)
    with refused(cw.errors.Stopped, "stopped-unsaved"):
        cw.fit(plain(), **QUIET)


def test_ctrl_c_before_training_leaves_at_once_and_writes_nothing(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("chipwise.engine.feed.read", interrupted)
    assert main(["train", "digits", "--run", str(tmp_path / "run"), "--devices", "1", "--quiet"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not (tmp_path / "run").exists()


def test_outside_the_main_thread_it_listens_for_nothing():
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def elsewhere():
        request = StopRequest()
        found.append(bool(request))
        request.close()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [False]
    assert signal.getsignal(signal.SIGTERM) is before


class Running:
    """`chipwise train` in a process of its own, once it has trained some steps."""

    def __init__(self, folder, *arguments):
        self.run = folder / "run"
        (folder / "long.py").write_text(FILE)
        env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(TESTS)}
        command = [
            sys.executable,
            "-c",
            "from chipwise.cli import main; main()",
            "train",
            f"{folder / 'long.py'}:recipe",
        ]
        command += ["--run", str(self.run), "--simulate", "1", "--quiet", "--log-every", "200st", *arguments]
        self.process = subprocess.Popen(
            command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        lines, deadline = self.lines(), time.monotonic() + 120
        while self.lines() <= lines and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def lines(self):
        file = self.run / "metrics.jsonl"
        return len(file.read_bytes().splitlines()) if file.exists() else 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def test_ctrl_c_ends_a_process_with_75_and_the_way_to_resume(tmp_path):
    with Running(tmp_path) as running:
        running.process.send_signal(signal.SIGINT)
        out, err = running.process.communicate(timeout=60)
    assert running.process.returncode == 75, err
    assert out == "" and "Traceback" not in err
    (step,) = re.findall(r"Stopped by SIGINT at step (\d+)", err)
    assert int(step) > 0
    assert f"error: {fact('stopped', signal='SIGINT', step=step, total=400000, run=running.run)}" in err


def test_a_second_ctrl_c_leaves_at_once_with_130(tmp_path):
    with Running(tmp_path, "--set", "slow=true") as running:
        running.process.send_signal(signal.SIGINT)
        while "again leaves at once" not in running.process.stderr.readline():
            assert running.process.poll() is None
        time.sleep(0.5)  # into the save
        before = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(timeout=60) == 130
        assert time.monotonic() - before < 5
